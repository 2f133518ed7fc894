"""Passes that are captured: the logits of eager passes over many rounds and calls, with a tape in the place of CUDA graphs."""

import pytest
import torch

import hf_ssd
from hf_ssd.cache import graphs, model_runner
from hf_ssd.cache.branches import Branches
from hf_ssd.cache.cached_model import CachedModel
from hf_ssd.cache.graphs import CapturedPass, Graphs, rounded
from hf_ssd.cache.ragged import RaggedCache, RaggedLayer

from ..conftest import FAMILIES, VOCAB, padded_batch, tiny_draft, tiny_model
from .tape import NotCaptured, use_tapes

ROWS, PROMPT, ROUNDS = 5, 9, 16
ENDS = {4: 2, 6: 0, 9: 4}  # rounds in which a row ends


@pytest.fixture
def tapes(monkeypatch):
    return use_tapes(monkeypatch)


@torch.inference_mode()
def call(model, cuda_graphs, rows=ROWS, rounds=ROUNDS, limit=None, padded=False):
    """
    Decodes like the target and the draft: verifications, feeding passes of several sizes and branches, for a text that
    grows, with rows that advance by different amounts and end.

    Returns:
        The logits of the rows that have not ended, of each pass, and the decoder.
    """
    generator = torch.Generator().manual_seed(rows)
    valid = torch.arange(PROMPT) >= torch.arange(rows)[:, None] if padded else None
    first = [-row for row in range(rows)] if padded else None
    decoder = CachedModel(model, RaggedCache(), valid, first, limit, cuda_graphs=cuda_graphs)

    def tokens(*shape):
        return torch.randint(2, VOCAB, (rows, *shape), generator=generator)

    found, lengths, live = [decoder.extend(tokens(PROMPT), [0] * rows)], [PROMPT] * rows, list(range(rows))
    for step in range(rounds):
        if step in ENDS and ENDS[step] in live:
            live.remove(ENDS[step])
            decoder.leave_out([row not in live for row in range(rows)])
        fed = (4, 4, 1, 6, 11)[step % 5]
        found.append(decoder.extend(tokens(fed), lengths)[live])
        lengths = [n + max(1, fed - (row + step) % 3) for row, n in enumerate(lengths)]
        one = decoder.extend(tokens(2), lengths, logits_to_keep=torch.tensor([1]))
        other = decoder.extend(tokens(2), [n + 2 for n in lengths])
        found += [one[live], other[live]]  # which are read after later passes
        forks = torch.tensor([[n - i % 2 for i in range(3 + step % 2)] for n in lengths])
        branches = Branches(decoder, forks, base=max(lengths) + 4, depth=3)
        found += [branches.grow(tokens(forks.shape[1]))[live] for _ in range(3)]
    decoder.close()
    return found, decoder


def same(ours, theirs) -> bool:
    return all(torch.allclose(one, other, atol=1e-4, rtol=1e-4) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_eager_passes(family, padded, tapes):
    model = tiny_model(family)
    expected, _ = call(model, False, padded=padded)
    found, decoder = call(model, "auto", padded=padded)
    kept = Graphs.of(model)
    assert same(found, expected) and kept.failure is None and kept.is_proven
    assert [len({key[axis] for key in kept.passes}) for axis in range(3)] == [3, 6, 2]  # rows, tokens and columns
    assert kept.capture.captured == decoder.preparations == len(kept.passes)
    assert kept.capture.replayed == 6 * ROUNDS


def test_a_second_call_captures_nothing(tapes):
    model = tiny_model()
    prepared = []
    for rows, limit in ((5, 300), (5, 300), (5, 200), (7, 300), (5, 300)):
        found, decoder = call(model, "auto", rows, limit=limit)
        assert same(found, call(model, False, rows, limit=limit)[0])
        prepared.append(decoder.preparations > 0)
    assert prepared == [True, False, False, True, False]  # with more rows, the storage has room for them already
    assert Graphs.of(model).storage[0][0].shape[::2] == (8, 1024)
