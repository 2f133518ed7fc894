"""Fallbacks of a user's own, Saguaro sampling and drafts that never agree, with a real worker."""

import pytest
import torch

import hf_ssd
from hf_ssd.generation import loop

from ..helpers.last_token import LastToken
from ..helpers.tiny import VOCAB, padded_batch, tiny_draft, tiny_model


def run(target, draft, rows, sampled=False, new_tokens=40, **settings):
    torch.manual_seed(3)
    return target.generate(
        **padded_batch(rows),
        max_new_tokens=new_tokens,
        **({"do_sample": True, "top_k": 20} if sampled else {"do_sample": False}),
        assistant_model=draft,
        ssd_config=hf_ssd.SSDConfig(**{"lookahead": 4, "budget": 16, **settings}),
        return_dict_in_generate=True,
    )


@pytest.mark.slow
def test_saguaro_sampling_trades_acceptance_for_hits(target, draft, assistant):
    few, many = (
        run(target, assistant, 8, sampled=True, new_tokens=120, saguaro_c=c, fan_out="geometric").ssd_stats
        for c in (1.0, 0.0)
    )
    assert many.hit_rate > few.hit_rate + 0.05 and many.acceptance_rate < few.acceptance_rate - 0.05


def test_a_fallback_of_ones_own_is_asked_for_rows_that_missed_alone(target, assistant):
    proposer = LastToken()
    stats = run(target, assistant, 4, fallback=proposer).ssd_stats
    misses = sum(
        not hit
        for hits, accepted in zip(stats.column("hits"), stats.column("accepted"))
        for hit, k in zip(hits, accepted)
        if k >= 0
    )
    assert 0 < proposer.asked <= misses + 4  # the last outcome of a row may be a miss that is not verified any more


def test_a_fallback_that_proposes_nonsense_is_named_and_the_next_call_works(target, assistant):
    class Nonsense:
        def propose(self, input_ids, lookahead):
            return torch.full((1, 2), VOCAB + 5), None

    with pytest.raises(ValueError, match="Nonsense"):
        run(target, assistant, 2, fallback=Nonsense())
    process = assistant.workers[0].process.popen.pid
    assert run(target, assistant, 2).ssd_stats.draft_failure is None
    assert assistant.workers[0].process.popen.pid == process


def test_a_fallback_that_cannot_propose_is_refused_before_any_work(target, assistant, monkeypatch):
    class NeedsMore:
        def propose(self, input_ids, lookahead, hidden_states):
            raise AssertionError("never asked")

    with pytest.raises(TypeError, match="`fallback` is a NeedsMore, which cannot propose"):
        run(target, assistant, 1, fallback=NeedsMore())
    monkeypatch.setattr(loop, "assistant_for", lambda model: pytest.fail("started a worker"))
    with pytest.raises(TypeError, match="`fallback` is a NeedsMore, which cannot propose"):
        run(target, tiny_draft(), 1, fallback=NeedsMore())


def test_a_draft_that_never_agrees_is_left_alone():
    """The plan becomes plain decoding, the stats say so, and what is generated is right."""
    target, stranger = hf_ssd.enable(tiny_model()), tiny_model(seed=99)
    output = run(target, stranger, 1, new_tokens=150, lookahead="auto", budget="auto", asynchronous=False)
    plain = target.generate(**padded_batch(1), max_new_tokens=150, do_sample=False)
    assert torch.equal(output.sequences, plain)
    stats = output.ssd_stats
    assert stats.column("lookahead").count(0) > stats.rounds / 2
    assert "not drafting" in stats.reason or "probe" in stats.reason
