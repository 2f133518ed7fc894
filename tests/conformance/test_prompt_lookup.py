"""Calls without a draft model: their plans, the distribution, and what is refused; equalities are in `matrix.py`."""

import functools

import pytest
import torch

import hf_ssd
from hf_ssd.generation.draft import FaultTolerantDraft
from hf_ssd.generation.proposers.ngrams import NgramIndex
from hf_ssd.planning.cost_model import NoDraftCosts
from hf_ssd.rounds import IN_TURN, NGRAM, NOTHING, PLAIN

from ..helpers.mutants import instead_of
from ..helpers.sampled_strings import SMALL, every_pair, p_value, power
from ..helpers.tiny import FEW, repeating_batch, speculated, tiny_draft, tiny_model
from .test_sampled import without_q_in_the_residual


@pytest.fixture(scope="module")
def repeating():
    return hf_ssd.enable(tiny_model(vocab_size=FEW))


def look_up(target, rows=1, new_tokens=40, **settings):
    config = {"drafter": "ngram", "lookahead": "auto", "budget": "auto", **settings}
    return speculated(target, None, repeating_batch(rows), config, least=0.9, max_new_tokens=new_tokens)


def check_speculated(stats, rows):
    """Some rows had matches and others not, some proposed tokens were accepted, and nothing was prepared."""
    sources = {source for record in stats.records for source in record.sources}
    assert stats.draft_failure is None and stats.draft_joined_at == 0 and sources == {NGRAM, NOTHING}
    accepted = [k for record in stats.records for k, one in zip(record.accepted, record.sources) if one == NGRAM]
    assert sum(accepted) > 0 and max(stats.column("lookahead")) > 1 and set(stats.column("budget")) == {0}
    for record in stats.records:
        assert len(record.sources) == rows and (NGRAM in record.sources or not record.lookahead)


# ---------------------------------------------------------------- the plan


def test_a_planned_call_proposes_longer_where_the_text_repeats_itself(repeating, monkeypatch):
    monkeypatch.setattr(NoDraftCosts, "seconds_to_verify", lambda *_: 1.0)  # a wider pass costs no more
    stats = look_up(repeating, new_tokens=100).ssd_stats
    check_speculated(stats, 1)
    assert set(stats.column("mode")) == {IN_TURN} and max(stats.column("lookahead")) > 5
    assert "lookahead 16" in stats.reason


def test_a_planned_call_decodes_plainly_where_matches_do_not_pay(repeating, monkeypatch):
    monkeypatch.setattr(NoDraftCosts, "seconds_to_verify", lambda costs, mode, lookahead: 1.0 + 5 * lookahead)
    stats = look_up(repeating, new_tokens=60).ssd_stats
    assert stats.column("mode").count(PLAIN) > 40 and "not drafting" in stats.reason


# ---------------------------------------------------------------- the distribution


LOOKUP = {"drafter": "ngram", "budget": "auto", "calls": 12, "prompt": every_pair()}


@pytest.mark.slow
def test_three_token_strings_have_the_targets_distribution(small):
    assert p_value(small[0], None, **LOOKUP, seed=3) > 1e-3


@instead_of(FaultTolerantDraft, "receive_probabilities")
def uniform_instead_of_certain(_, self):
    return torch.full((len(self.verified), len(self.verified[0]), SMALL), 1 / SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [uniform_instead_of_certain, without_q_in_the_residual])
def test_a_proposal_that_does_not_count_as_certain_is_noticed(small, mutant, monkeypatch):
    """The mutants for the test above."""
    mutant(monkeypatch)
    assert power(small[0], None, **LOOKUP, seed=3) > 0.99


def test_a_match_one_position_off_is_noticed(repeating, monkeypatch):
    """The mutant for the tests of equality: such tokens are hardly ever accepted, and the answer is the same."""
    right = look_up(repeating, lookahead=5, new_tokens=80).ssd_stats
    propose = NgramIndex.propose
    monkeypatch.setattr(NgramIndex, "propose", lambda self, count: propose(self, count + 1)[1:])
    wrong = look_up(repeating, lookahead=5, new_tokens=80).ssd_stats
    check_speculated(right, 1)
    assert wrong.acceptance_rate < 0.7 * right.acceptance_rate


# ---------------------------------------------------------------- what is refused, and who looks up


def test_a_draft_model_beside_a_lookup_is_refused():
    with pytest.raises(ValueError, match="uses no draft model"):
        hf_ssd.enable(tiny_model(vocab_size=FEW), tiny_draft(vocab_size=FEW), hf_ssd.SSDConfig(drafter="ngram"))


@pytest.mark.parametrize("settings", [{"budget": 8}, {"fallback": "random"}, {"fan_out": [2, 1]}], ids=str)
def test_settings_that_a_lookup_has_no_use_for_are_refused(settings):
    with pytest.raises(ValueError, match="with drafter=.ngram., which"):
        hf_ssd.SSDConfig(drafter="ngram", **settings)


@pytest.mark.parametrize("ranks, options, words", [
    (1, {"assistant_tokenizer": object()}, "`assistant_tokenizer` is of a draft model, and there is none"),
    (1, {"assistant_model": tiny_draft(vocab_size=FEW)}, "uses no draft model; leave out `assistant_model`"),
    (2, {}, "works for a target in one process, and 2 ranks share this target"),
])  # fmt: skip
def test_a_call_that_cannot_look_up_is_refused(ranks, options, words):
    target = hf_ssd.enable(tiny_model(vocab_size=FEW))
    target._tp_size = ranks
    with pytest.raises(ValueError, match=words):
        target.generate(**repeating_batch(1), ssd_config={"drafter": "ngram"}, tokenizer=object(), **options)


def test_a_lookup_takes_no_draft_however_it_is_called():
    bound = hf_ssd.enable(tiny_model(vocab_size=FEW), tiny_draft(vocab_size=FEW))
    options = {**repeating_batch(2), "max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
    for generate in (bound.generate, functools.partial(hf_ssd.generate, tiny_model(vocab_size=FEW))):
        check_speculated(generate(**options, ssd_config={"drafter": "ngram", "lookahead": 4}).ssd_stats, 2)


def test_advice_for_a_text_that_hardly_repeats_itself_names_a_draft_model(repeating, monkeypatch):
    propose = NgramIndex.propose
    monkeypatch.setattr(NgramIndex, "propose", lambda *request: [(t + 1) % FEW for t in propose(*request)])
    (advice,) = look_up(repeating, new_tokens=80, lookahead=4).ssd_stats.advice
    assert "the text hardly repeats itself; use a draft model" in advice
