import contextlib
import os
import queue
import threading

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


@contextlib.contextmanager
def a_thread(cores=None):
    """The number that the system gives to a thread, which lives for the length of the block."""
    numbers, end = queue.Queue(), threading.Event()

    def live():
        if cores is not None:
            os.sched_setaffinity(0, cores)
        numbers.put(threading.get_native_id())
        end.wait()

    thread = threading.Thread(target=live)
    thread.start()
    yield numbers.get()
    end.set()
    thread.join()


def test_threads_do_not_keep_the_cores_of_the_call_they_were_made_in():
    available = os.sched_getaffinity(0)
    if len(available) < 2:
        pytest.skip("needs two cores")
    first, other = ({core} for core in sorted(available)[:2])
    with contextlib.ExitStack() as threads:
        pinned_before = threads.enter_context(a_thread(first))
        with use_cores(tuple(first)):
            made_within = threads.enter_context(a_thread())
            pinned_within = threads.enter_context(a_thread(other))
            assert os.sched_getaffinity(made_within) == first
        assert os.sched_getaffinity(made_within) == available
        assert os.sched_getaffinity(pinned_before) == first and os.sched_getaffinity(pinned_within) == other
        with use_cores(tuple(first)):
            with use_cores(tuple(other)):
                made_deeper = threads.enter_context(a_thread())
        assert os.sched_getaffinity(made_deeper) == available
