"""Rows that are finished are left out of forward passes: the others go on as before, and nothing of any row is lost."""

import pytest
import torch
from transformers import DynamicCache

import hf_ssd
from hf_ssd.cache.branches import Branches
from hf_ssd.cache.cache_name import CACHE
from hf_ssd.cache.cached_model import CachedModel
from hf_ssd.cache.ragged import RaggedCache, RaggedLayer
from hf_ssd.cache.trial import check_supported

from ..helpers.tiny import FAMILIES, VOCAB, padded_batch, tiny_model
from .test_cached_model import EXACT, fresh_logits

ENDS = [(0, [False] * 4), (2, [False, True, False, False]), (4, [True, True, False, True])]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("no_room")
@torch.inference_mode()
def test_what_remains_equals_fresh_forward_passes(family):
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(0)
    rows = list(torch.randint(2, VOCAB, (4, 8), generator=generator))
    decoder = CachedModel(model, RaggedCache())
    decoder.extend(torch.stack(rows), [0] * 4)
    for step in range(6):
        finished = next(now for since, now in reversed(ENDS) if since <= step)
        decoder.leave_out(finished)
        new = torch.randint(2, VOCAB, (4, 3), generator=generator)
        logits = decoder.extend(new, [len(row) for row in rows])
        forks = torch.tensor([[len(row), len(row) - 1] for row in rows])
        grown = torch.randint(2, VOCAB, (4, 2), generator=generator)
        branches = Branches(decoder, forks, base=max(map(len, rows)) + 3, depth=1).grow(grown)
        for i, row in enumerate(rows):
            if finished[i]:
                assert not logits[i].any() and not branches[i].any()
                continue
            expected = fresh_logits(model, torch.cat([row, new[i]]))[-3:]
            torch.testing.assert_close(logits[i], expected, **EXACT)
            for branch in range(2):
                alone = torch.cat([row[: forks[i, branch]], grown[i, branch, None]])
                torch.testing.assert_close(branches[i, branch], fresh_logits(model, alone)[-1], **EXACT)
            rows[i] = torch.cat([row, new[i, : 1 + (i + step) % 3]])  # the rest is rejected

    theirs = decoder.cache.copy_to(DynamicCache(), 9)
    assert decoder.cache.rows is None
    for i, row in enumerate(rows):
        alone = DynamicCache()
        model(input_ids=row[None, :9], **{CACHE: alone})
        for layer, expected in zip(theirs.layers, alone.layers):
            torch.testing.assert_close(layer.keys[i], expected.keys[0], **EXACT)


def test_rows_that_change_places_without_their_cache_are_noticed(monkeypatch):
    """The mutant for the test above."""
    monkeypatch.setattr(RaggedLayer, "move_rows", lambda self, places, rows: None)
    with pytest.raises(AssertionError):
        test_what_remains_equals_fresh_forward_passes("llama")


def test_no_row_moves_that_need_not():
    cache = RaggedCache()
    moves = []
    cache._arrange = lambda before, order: moves.append([a != b for a, b in zip(before, order)])
    cache.leave_out([False, True, False, False, True])
    assert (cache.rows, cache.left_out) == ([0, 3, 2], [1, 4]) and moves.pop() == [False, True, False, True, False]
    cache.leave_out([False, True, True, False, True])
    assert cache.rows == [0, 3] and moves.pop() == [False] * 5
    cache.leave_out([True] * 5)
    assert len(cache.rows) == 1  # a forward pass over nothing is none


@pytest.mark.parametrize("asynchronous", [False, True])
def test_finished_rows_are_not_computed(target, draft, assistant, asynchronous, monkeypatch):
    """Of a batch whose rows end at different lengths; and the tokens are those of plain generation."""
    check_supported(target)  # by passes that are not counted
    computed = []
    forward = CachedModel.forward

    def counted(self, tokens, *args):
        if self.model is target:
            computed.append(len(tokens))
        return forward(self, tokens, *args)

    check_supported(target)  # whose passes are not counted
    monkeypatch.setattr(CachedModel, "forward", counted)
    inputs, options = padded_batch(4), {"max_new_tokens": 40, "do_sample": False, "eos_token_id": [5, 6, 7, 8, 9, 10]}
    expected = target.generate(**inputs, **options)
    output = target.generate(
        **inputs,
        **options,
        assistant_model=assistant if asynchronous else draft,
        ssd_config=hf_ssd.SSDConfig(lookahead=3, budget=8, asynchronous=asynchronous),
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, expected)
    live = [sum(k >= 0 for k in accepted) for accepted in output.ssd_stats.column("accepted")]
    # Behind the rounds, the rows that ended before the others are fed what the returned cache lacks of them.
    assert computed[:-1] == live and len(set(live)) > 2 and computed[-1] == 3
    assert output.ssd_stats.draft_failure is None
