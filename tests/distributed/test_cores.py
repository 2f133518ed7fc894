import os

import pytest
import torch

from hf_ssd.distributed import cores
from hf_ssd.distributed.cores import CoreShare, divide_cores, use_cores


@pytest.mark.parametrize(
    "available, threads, target, draft",
    [
        (range(2), None, (0,), (1,)),
        (range(8), None, (0, 1, 2, 3, 4, 5), (6, 7)),
        (range(8), 5, (0, 1, 2), (3, 4, 5, 6, 7)),
        ([3], None, (3,), (3,)),
        (range(2), 2, (0, 1), (0, 1)),
    ],
)
def test_division(monkeypatch, available, threads, target, draft):
    monkeypatch.setattr(cores, "available_cores", lambda: tuple(available))
    assert divide_cores(threads) == CoreShare(target, (draft,))


@pytest.mark.parametrize(
    "available, threads, target, drafts",
    [
        (range(8), 2, (0, 1, 2, 3), ((4, 5), (6, 7))),
        (range(2), 1, (0,), ((1,), (1,))),  # not enough: the drafts share
        ([3], None, (3,), ((3,), (3,))),
    ],
)
def test_division_between_several_drafts(monkeypatch, available, threads, target, drafts):
    monkeypatch.setattr(cores, "available_cores", lambda: tuple(available))
    assert divide_cores(threads, drafts=2) == CoreShare(target, drafts)


@pytest.mark.parametrize("threads", [0, 3])
def test_too_many_or_no_cores(monkeypatch, threads):
    monkeypatch.setattr(cores, "available_cores", lambda: (0, 1))
    with pytest.raises(ValueError, match="between 1 and the 2 cores"):
        divide_cores(threads)


def test_threads_and_cores_are_restored_even_after_an_error():
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    with pytest.raises(KeyError):
        with use_cores((min(before[1]),)):
            assert torch.get_num_threads() == 1 and os.sched_getaffinity(0) == {min(before[1])}
            raise KeyError
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == before
