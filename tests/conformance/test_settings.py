"""Every setting of SSDConfig with a real worker: the same tokens as plain generate(), or as the synchronous oracle."""

import time

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_ssd
from hf_ssd.generation import loop
from hf_ssd.rounds import AHEAD

from ..conftest import VOCAB, padded_batch, tiny_draft, tiny_model


class LastTokenAgain:
    calls = 0

    def propose(self, input_ids, lookahead):
        self.calls += 1
        assert input_ids.shape[0] == 1 and not (input_ids == 0).all()
        return input_ids[:, -1:].repeat(1, 2), None


SETTINGS = {
    **{shape: {"fan_out": shape} for shape in ("confidence", "geometric", "uniform", "all_accepted", "single_branch",
                                               "greedy_tree")},
    "a list": {"fan_out": [6, 3, 0, 2, 5]},
    "n-grams": {"fallback": "ngram"},
    "random": {"fallback": "random"},
    "custom": {"fallback": LastTokenAgain()},
    "prompt lookup": {"fallback": PromptLookupCandidateGenerator(max_length=1000)},
    "auto": {"lookahead": "auto", "budget": "auto"},
    "auto budget": {"budget": "auto"},
    "auto lookahead": {"lookahead": "auto"},
}  # fmt: skip


def run(target, draft, rows, sampled=False, seed=3, new_tokens=40, **settings):
    settings = {"lookahead": 4, "budget": 16, **settings} if "fan_out" not in settings else settings
    if isinstance(settings.get("fan_out"), str):
        settings = {"lookahead": 4, "budget": 16, **settings}
    torch.manual_seed(seed)
    return target.generate(
        **padded_batch(rows),
        max_new_tokens=new_tokens,
        **({"do_sample": True, "top_k": 20} if sampled else {"do_sample": False}),
        assistant_model=draft,
        ssd_config=hf_ssd.SSDConfig(**settings),
        return_dict_in_generate=True,
    )


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_equals_plain_generate(target, assistant, name, rows):
    new_tokens = 80 if "auto" in name else 40
    plain = target.generate(**padded_batch(rows), max_new_tokens=new_tokens, do_sample=False)
    slow = lambda *_: time.sleep(0.06 if "auto" in name else 0.0)  # noqa: E731  such a target gains by any draft
    hook = target.register_forward_pre_hook(slow)
    try:
        output = run(target, assistant, rows, new_tokens=new_tokens, **SETTINGS[name])
    finally:
        hook.remove()
    assert torch.equal(output.sequences, plain)
    stats = output.ssd_stats
    assert (
        stats.draft_failure is None
        and max(stats.column("lookahead")) > 1
        and max(max(row) for row in stats.column("accepted")) > 0
    )
    if name == "auto budget":
        assert AHEAD in stats.column("mode")
    if "auto" not in name:
        assert 0 < stats.hit_rate < 1 and max(stats.column("budget")) == (
            16 if name != "all_accepted" else stats.column("budget")[-1]
        )


@pytest.mark.parametrize(
    "settings", [{"saguaro_c": 0.5}, {"saguaro_c": 0.0}, {"budget": "auto"}, {"fan_out": "uniform"}]
)
def test_a_fixed_lookahead_gives_the_tokens_of_the_synchronous_oracle(target, draft, assistant, settings):
    ahead = run(target, assistant, 3, sampled=True, **settings)
    in_turn = run(target, draft, 3, sampled=True, asynchronous=False, **settings)
    assert torch.equal(ahead.sequences, in_turn.sequences)
    assert ahead.ssd_stats.hit_rate > 0 or "budget" in settings  # such a quick target may leave no time to prepare
    assert ahead.ssd_stats.column("accepted") == in_turn.ssd_stats.column("accepted")


@pytest.mark.slow
def test_saguaro_sampling_trades_acceptance_for_hits(target, draft, assistant):
    few, many = (
        run(target, assistant, 8, sampled=True, new_tokens=120, saguaro_c=c, fan_out="geometric").ssd_stats
        for c in (1.0, 0.0)
    )
    assert many.hit_rate > few.hit_rate + 0.05 and many.acceptance_rate < few.acceptance_rate - 0.05


def test_a_fallback_of_ones_own_is_asked_for_rows_that_missed_alone(target, assistant):
    proposer = LastTokenAgain()
    stats = run(target, assistant, 4, fallback=proposer).ssd_stats
    misses = sum(
        not hit
        for hits, accepted in zip(stats.column("hits"), stats.column("accepted"))
        for hit, k in zip(hits, accepted)
        if k >= 0
    )
    assert 0 < proposer.calls <= misses + 4  # the last outcome of a row may be a miss that is not verified any more


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
