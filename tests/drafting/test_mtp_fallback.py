"""An MTP layer of the target that drafts where an outcome was not prepared, beside a draft that works ahead."""

import dataclasses

import pytest
import torch

import hf_ssd
from hf_ssd.drafting.heads import loading
from hf_ssd.drafting.heads.mtp import MtpHead
from hf_ssd.generation import loop
from hf_ssd.generation.proposers.mtp import MtpFallback
from hf_ssd.rounds import AHEAD, IN_TURN, PLAIN, PREPARED, Plan

from ..helpers.heads import drafted_in, tiny_head, tiny_mtp_head
from ..helpers.preparing import preparing
from ..helpers.sampled_strings import noise_of_rounds, p_value, power
from ..helpers.tiny import padded_batch
from ..planning.test_plain_mode import InAndOut

MTP = "mtp"  # the fallback, and the source of its tokens
COUPLED = {"verification": "coupled"}


@pytest.fixture
def head(target, monkeypatch):
    """The MTP layer of the target, as if it had been loaded from the checkpoint."""
    monkeypatch.setitem(loading._heads, target, {MtpHead: (head := tiny_mtp_head(target))})
    return head


def call(target, draft, rows=3, **options):
    torch.manual_seed(4)
    config = {"lookahead": 3, "budget": 3, "fallback": "mtp", "on_draft_failure": "raise", **options.pop("ssd", {})}
    options = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True, **options}
    return target.generate(
        **padded_batch(rows), assistant_model=draft, ssd_config=hf_ssd.SSDConfig(**config), **options
    )


def check_drafts_as_in_turn(target, draft, monkeypatch, plans=None):
    """After a miss the head drafts the tokens that it drafts after the same text as the only draft, in turn."""
    outputs, alone = [], {"drafter": "mtp", "budget": "auto", "fallback": "auto"}
    in_turn = drafted_in(lambda: outputs.append(call(target, None, ssd=alone)))
    if plans is not None:
        monkeypatch.setattr(loop, "planner_for", lambda *_: plans)
    with preparing():
        ours = drafted_in(lambda: outputs.append(call(target, draft, ssd={"asynchronous": False})))
    assert torch.equal(*(output.sequences for output in outputs))
    common = in_turn.keys() & ours.keys()
    assert len(common) > 12 and all(in_turn[place] == ours[place] for place in common)
    return outputs[1]


def test_after_a_miss_the_head_drafts_as_in_turn_and_the_tokens_are_plain_generates(target, draft, head, monkeypatch):
    output = check_drafts_as_in_turn(target, draft, monkeypatch)
    of_rounds = [{record.sources[row] for row in record.live} for record in output.ssd_stats.records]
    assert {*output.ssd_stats.column("mode")} == {AHEAD} and {PREPARED, MTP} in of_rounds
    assert set().union(*of_rounds) == {PREPARED, MTP}
    assert torch.equal(output.sequences, target.generate(**padded_batch(3), max_new_tokens=40, do_sample=False))


def check_coupled(target, draft):
    alone = call(target, None, do_sample=True, ssd={"lookahead": 0, "fallback": "auto", **COUPLED})
    with preparing() as hits:
        output = call(target, draft, do_sample=True, ssd={"asynchronous": False, **COUPLED})
    assert torch.equal(output.sequences, alone.sequences) and 0 < sum(hits) < len(hits)
    records = output.ssd_stats.records
    for source in (PREPARED, MTP):
        assert sum(r.accepted[row] for r in records for row in r.live if r.sources[row] == source) > 0


def test_coupled_texts_are_those_of_single_passes(target, draft, head, monkeypatch):
    check_coupled(target, draft)
    noise_of_rounds(monkeypatch)  # the mutant
    with pytest.raises(AssertionError):
        check_coupled(target, draft)


@pytest.mark.slow
def test_the_head_follows_the_text_through_plain_rounds(target, draft, head, monkeypatch):
    stats = check_drafts_as_in_turn(target, draft, monkeypatch, InAndOut(Plan(IN_TURN, 3, 3, fallback=MTP))).ssd_stats
    assert {record.mode for record in stats.records} == {PLAIN, AHEAD} and MTP in {*sum(stats.column("sources"), [])}


@pytest.mark.slow
def test_a_head_that_reads_another_text_is_noticed(target, draft, head, monkeypatch):
    take_in = MtpFallback.take_in

    def one_off(self, outcome, plan):
        take_in(self, dataclasses.replace(outcome, states=outcome.states.roll(1, 0)), plan)

    monkeypatch.setattr(MtpFallback, "take_in", one_off)
    with pytest.raises(AssertionError):
        check_drafts_as_in_turn(target, draft, monkeypatch)


@pytest.mark.slow
def test_a_worker_that_misses_is_completed_by_the_head(target, assistant, head):
    plain = target.generate(**padded_batch(3), max_new_tokens=40, do_sample=False)
    output = call(target, assistant)
    assert torch.equal(output.sequences, plain)
    records = output.ssd_stats.records
    assert {record.sources[row] for record in records for row in record.live} == {PREPARED, MTP}
    assert {record.mode for record in records} == {AHEAD}
    assert torch.equal(*(call(target, assistant, do_sample=True).sequences for _ in range(2)))


@pytest.mark.slow
@pytest.mark.parametrize("is_rolled", [False, True])
def test_three_token_strings_have_the_targets_distribution(small, is_rolled, monkeypatch):
    """Some begin with a hit and others with a token of the head. The mutant: q is that of another row."""
    target, draft = small
    propose = MtpFallback.propose

    def rolled(self, *request):
        proposals = propose(self, *request)
        others = [proposals[-1], *proposals[:-1]]
        return [one._replace(probabilities=other.probabilities) for one, other in zip(proposals, others)]

    if is_rolled:
        monkeypatch.setattr(MtpFallback, "propose", rolled)
    monkeypatch.setitem(loading._heads, target, {MtpHead: tiny_mtp_head(target)})
    with preparing() as hits:
        measure = power if is_rolled else p_value
        value = measure(target, draft, calls=8, seed=5, budget=3, fallback="mtp", at_least=1.0)
    assert 0.1 < sum(hits) / len(hits) < 0.9
    assert value > 0.99 if is_rolled else value > 1e-3


def test_targets_and_drafts_that_do_not_fit_are_refused_in_one_sentence(target, draft):
    with pytest.raises(ValueError, match="has no layer for multi-token prediction"):
        call(target, draft)
    with pytest.raises(ValueError, match="this draft reads hidden states of its own; leave it out"):
        call(target, tiny_head(target))
    with pytest.raises(ValueError, match='`fallback` is .mtp., but must be "auto" with drafter="ngram"'):
        hf_ssd.SSDConfig(drafter="ngram", fallback="mtp")
