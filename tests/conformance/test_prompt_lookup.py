"""Calls without a draft model: their plans, the distribution, and what is refused; equalities are in `matrix.py`."""

import pytest
import torch

import hf_ssd
from hf_ssd.generation.draft import FaultTolerantDraft
from hf_ssd.generation.proposers.ngrams import NgramIndex
from hf_ssd.planning.cost_model import NoDraftCosts
from hf_ssd.rounds import IN_TURN, NGRAM, NOTHING, PLAIN

from ..helpers.sampled_strings import SMALL, every_pair, p_value
from ..helpers.tiny import padded_batch, tiny_draft, tiny_model

FEW = 12  # tokens, so that texts repeat themselves


@pytest.fixture(scope="module")
def repeating():
    return hf_ssd.enable(tiny_model(vocab_size=FEW))


def prompts(rows):
    batch = padded_batch(rows)
    return {**batch, "input_ids": batch["input_ids"] % FEW}


def look_up(target, rows=1, new_tokens=40, **settings):
    output = target.generate(
        **prompts(rows),
        max_new_tokens=new_tokens,
        do_sample=False,
        ssd_config=hf_ssd.SSDConfig(drafter="ngram", **settings),
        return_dict_in_generate=True,
    )
    check_speculated(output.ssd_stats, rows)
    return output


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
    plain = repeating.generate(**prompts(4), max_new_tokens=60, do_sample=False)
    output = look_up(repeating, 4, new_tokens=60)
    stats = output.ssd_stats
    assert torch.equal(output.sequences, plain)
    assert set(stats.column("mode")) == {IN_TURN} and max(stats.column("lookahead")) > 5
    assert "lookahead 16" in stats.reason


def test_a_planned_call_decodes_plainly_where_matches_do_not_pay(repeating, monkeypatch):
    monkeypatch.setattr(NoDraftCosts, "seconds_to_verify", lambda costs, mode, lookahead: 1.0 + 5 * lookahead)
    plain = repeating.generate(**prompts(1), max_new_tokens=60, do_sample=False)
    output = repeating.generate(
        **prompts(1),
        max_new_tokens=60,
        do_sample=False,
        ssd_config=hf_ssd.SSDConfig(drafter="ngram"),
        return_dict_in_generate=True,
    )
    modes = output.ssd_stats.column("mode")
    assert torch.equal(output.sequences, plain)
    assert modes.count(PLAIN) > 40 and "not drafting" in output.ssd_stats.reason


# ---------------------------------------------------------------- the distribution


LOOKUP = {"drafter": "ngram", "budget": "auto", "calls": 12, "prompt": every_pair()}


def test_three_token_strings_have_the_targets_distribution(small):
    target, _ = small
    assert p_value(target, None, **LOOKUP, seed=3) > 1e-3


def test_a_proposal_that_does_not_count_as_certain_is_noticed(small, monkeypatch):
    """The mutant for the test above: q is uniform instead of the point mass."""
    target, _ = small
    uniform = lambda self: torch.full((len(self.verified), len(self.verified[0]), SMALL), 1 / SMALL)  # noqa: E731
    monkeypatch.setattr(FaultTolerantDraft, "receive_probabilities", uniform)
    assert p_value(target, None, **LOOKUP, seed=3) < 1e-6


def test_a_match_one_position_off_is_noticed(repeating, monkeypatch):
    """The mutant for the tests of equality: such tokens are hardly ever accepted, and the answer is the same."""
    right = look_up(repeating, lookahead=5, new_tokens=80)
    propose = NgramIndex.propose
    monkeypatch.setattr(NgramIndex, "propose", lambda self, count: propose(self, count + 1)[1:])
    wrong = look_up(repeating, lookahead=5, new_tokens=80)
    assert torch.equal(wrong.sequences, right.sequences)
    assert wrong.ssd_stats.acceptance_rate < 0.7 * right.ssd_stats.acceptance_rate


# ---------------------------------------------------------------- what is refused, and who looks up


def test_a_draft_model_beside_a_lookup_is_refused(repeating):
    config = hf_ssd.SSDConfig(drafter="ngram")
    with pytest.raises(ValueError, match="uses no draft model; leave out `assistant_model`"):
        repeating.generate(**prompts(1), assistant_model=tiny_draft(vocab_size=FEW), ssd_config=config)
    with pytest.raises(ValueError, match="uses no draft model"):
        hf_ssd.enable(tiny_model(vocab_size=FEW), tiny_draft(vocab_size=FEW), config)


@pytest.mark.parametrize("settings", [{"budget": 8}, {"fallback": "random"}, {"fan_out": [2, 1]}], ids=str)
def test_settings_that_a_lookup_has_no_use_for_are_refused(settings):
    with pytest.raises(ValueError, match="with drafter=.ngram., which"):
        hf_ssd.SSDConfig(drafter="ngram", **settings)


def test_a_tokenizer_of_a_draft_that_is_not_there_is_refused(repeating):
    with pytest.raises(ValueError, match="`assistant_tokenizer` is of a draft model, and there is none"):
        repeating.generate(
            **prompts(1), ssd_config={"drafter": "ngram"}, tokenizer=object(), assistant_tokenizer=object()
        )


def test_a_model_can_be_enabled_with_a_lookup_for_all_its_calls():
    target = hf_ssd.enable(tiny_model(vocab_size=FEW), ssd_config={"drafter": "ngram", "lookahead": 4})
    stats = target.generate(**prompts(1), max_new_tokens=40, return_dict_in_generate=True, do_sample=False).ssd_stats
    check_speculated(stats, 1)


def test_a_lookup_leaves_the_draft_of_an_enabled_model_aside():
    target = hf_ssd.enable(tiny_model(vocab_size=FEW), tiny_draft(vocab_size=FEW))
    assert look_up(target, lookahead=4).ssd_stats.tokens_per_round > 1


def test_hf_ssd_generate_looks_up_without_an_assistant_model():
    config = hf_ssd.SSDConfig(drafter="ngram", lookahead=4)
    model = tiny_model(vocab_size=FEW)
    output = hf_ssd.generate(
        model, **prompts(2), ssd_config=config, max_new_tokens=40, do_sample=False, return_dict_in_generate=True
    )
    check_speculated(output.ssd_stats, 2)
    assert torch.equal(output.sequences, model.generate(**prompts(2), max_new_tokens=40, do_sample=False))


def test_advice_for_a_text_that_hardly_repeats_itself_names_a_draft_model(repeating, monkeypatch):
    propose = NgramIndex.propose
    monkeypatch.setattr(NgramIndex, "propose", lambda *request: [(t + 1) % FEW for t in propose(*request)])
    output = repeating.generate(
        **prompts(1),
        max_new_tokens=80,
        do_sample=False,
        ssd_config=hf_ssd.SSDConfig(drafter="ngram", lookahead=4),
        return_dict_in_generate=True,
    )
    (advice,) = output.ssd_stats.advice
    assert "the text hardly repeats itself; use a draft model" in advice


def test_a_target_that_several_ranks_share_is_refused():
    target = hf_ssd.enable(tiny_model(vocab_size=FEW))
    target._tp_size = 2
    with pytest.raises(ValueError, match="works for a target in one process, and 2 ranks share this target"):
        target.generate(**prompts(1), ssd_config=hf_ssd.SSDConfig(drafter="ngram"))
