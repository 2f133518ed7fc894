"""N-grams that compete with a draft, row by row: tokens of plain generate(), samples of its distribution."""

import dataclasses
from collections import Counter

import pytest
import torch

import hf_ssd
from hf_ssd.drafting.drafter import Completion
from hf_ssd.generation.proposers import ngrams, proposers
from hf_ssd.generation.proposers.proposers import Proposers
from hf_ssd.planning.cost_model import CostModel
from hf_ssd.planning.fixed_plan import FixedPlan
from hf_ssd.rounds import IN_TURN, NGRAM, NOTHING, PLAIN, PREPARED, PRIMARY

from ..helpers.comparing import as_plain, generate
from ..helpers.mutants import instead_of
from ..helpers.preparing import preparing
from ..helpers.sampled_strings import SOME_PAIRS, p_value, power
from ..helpers.tiny import FEW, padded_batch, repeating_batch, tiny_draft, tiny_model

REPEATING = repeating_batch(4)
PLANNED = {"lookahead": "auto", "budget": "auto"}


@pytest.fixture
def competing(monkeypatch):
    """With a fixed lookahead too, which the planner's measurements of time do not reach."""
    init = FixedPlan.__init__

    def with_ngrams(self, *arguments, **options):
        init(self, *arguments, **options)
        self.plan = dataclasses.replace(self.plan, early=9)

    monkeypatch.setattr(FixedPlan, "__init__", with_ngrams)


@pytest.fixture(scope="module")
def pair():
    return hf_ssd.enable(tiny_model(vocab_size=FEW)), tiny_draft(vocab_size=FEW)


def accepted_of(stats, source):
    """The accepted counts of all rows with this source, in rounds that were not cut at the end of the text."""
    return [r.accepted[row] for r in stats.records for row in r.live if r.sources[row] == source]


def check_competed(stats, others):
    """Some rows verified n-grams and others drafted tokens in one round, and tokens of both were accepted."""
    for source in (NGRAM, *others):
        assert sum(accepted_of(stats, source)) > 0, source
    mixed = [r for r in stats.records if len({r.sources[row] for row in r.live} & {NGRAM, *others}) > 1]
    assert any(record.lengths and len({*record.lengths}) > 1 for record in mixed)
    assert {NGRAM, *others} >= {r.sources[row] for r in stats.records for row in r.live}


def test_greedy_tokens_are_those_of_plain_generate(pair, competing):
    """In turn and ahead of time, in a padded batch; outcomes behind n-grams are prepared too, and hit."""
    options = {"of_config": {"lookahead": 3, "budget": 8}, "max_new_tokens": 60}
    output, _ = as_plain(*pair, REPEATING, **options)
    with preparing() as hits:
        ahead, _ = as_plain(*pair, REPEATING, **options)
    for one, others in ((output, [PRIMARY]), (ahead, [PRIMARY, PREPARED])):
        check_competed(one.ssd_stats, others)
        assert {record.early for record in one.ssd_stats.records} == {9}
    assert ahead.ssd_stats.column("accepted") == output.ssd_stats.column("accepted") and sum(hits)
    records = ahead.ssd_stats.records
    behind = [now.sources[row] for before, now in zip(records, records[1:]) for row in now.live
              if before.sources[row] == NGRAM]  # fmt: skip
    assert PREPARED in behind
    # The draft does nothing where all rows have an n-gram.
    assert not any(record.steps for record in records if {record.sources[row] for row in record.live} == {NGRAM})


def test_a_worker_gives_the_tokens_of_drafting_in_turn(target, draft, assistant, competing):
    """Sampled: which rows verify n-grams depends on the verified text alone."""
    options = {"do_sample": True, "temperature": 0.2, "suppress_tokens": [*range(5, 97)], "max_new_tokens": 60}
    outputs = []
    for model in (draft, assistant):
        torch.manual_seed(5)
        outputs.append(generate(target, model, padded_batch(4), {"lookahead": 3, "budget": 8}, **options))
    in_turn, ahead = outputs
    assert torch.equal(ahead.sequences, in_turn.sequences)
    assert ahead.ssd_stats.column("accepted") == in_turn.ssd_stats.column("accepted")
    assert ahead.ssd_stats.column("lengths") == in_turn.ssd_stats.column("lengths")
    sources = [source for record in ahead.ssd_stats.records for source in record.sources]
    assert NGRAM in sources and PREPARED in sources and sum(accepted_of(ahead.ssd_stats, NGRAM)) > 0


# ---------------------------------------------------------------- the plan


@pytest.fixture
def wide_passes_are_free(monkeypatch):
    monkeypatch.setattr(CostModel, "seconds_to_verify", lambda *_: 1.0)
    monkeypatch.setattr(CostModel, "seconds_to_draft", lambda costs, mode, lookahead: 0.01 * lookahead)


@pytest.mark.slow
def test_a_planned_call_lets_ngrams_compete_where_the_text_repeats_itself(pair, wide_passes_are_free):
    draft = tiny_draft(vocab_size=FEW, disagreement=0.005)
    output, _ = as_plain(pair[0], draft, REPEATING, PLANNED, max_new_tokens=100)
    stats = output.ssd_stats
    assert "n-grams of up to" in stats.reason
    assert sum(accepted_of(stats, NGRAM)) > 40 and stats.column("mode").count(IN_TURN) > 0.8 * stats.rounds
    assert {record.early for record in stats.records} >= {0, 16}  # first it is seen that they would be right


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_planned_call_with_a_draft_that_does_not_pay_verifies_ngrams_alone(
    pair, assistant, wide_passes_are_free, monkeypatch, asynchronous
):
    """Most rounds ask no draft, and their n-grams are found after two tokens that have occurred before."""
    monkeypatch.setattr(CostModel, "seconds_to_draft", lambda costs, mode, lookahead: 100.0 * lookahead)
    monkeypatch.setattr(CostModel, "seconds_to_prepare", lambda *_: 100.0)
    target, draft = pair
    output, _ = as_plain(target, assistant if asynchronous else draft, REPEATING, PLANNED, max_new_tokens=200)
    stats = output.ssd_stats
    assert stats.reason.startswith("not drafting, but n-grams of up to 16")
    alone = [record for record in stats.records if record.mode == PLAIN and record.early]
    assert len(alone) > 0.6 * stats.rounds and {record.early for record in alone} == {16}
    assert {source for record in alone for source in record.sources} == {NGRAM, NOTHING}
    given = [pair for record in stats.records for pair in zip(record.early_alone, record.early_beside)]
    assert any(alone > beside for alone, beside in given)  # matches too short for beside a draft
    assert sum(record.accepted[row] for record in alone for row in record.live if record.sources[row] == NGRAM) > 100


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"fallback": "primary"}, {"lookahead": 3}])
def test_where_the_settings_name_who_proposes_no_ngram_competes(pair, wide_passes_are_free, settings):
    output, _ = as_plain(*pair, REPEATING, {**PLANNED, **settings}, max_new_tokens=60)
    sources = {source for record in output.ssd_stats.records for source in record.sources}
    assert PRIMARY in sources and NGRAM not in sources


# ---------------------------------------------------------------- the distribution


@pytest.fixture
def some_pairs(monkeypatch, competing):
    """N-grams are proposed after each pair of tokens that has occurred: in a round some rows match."""
    monkeypatch.setattr(ngrams, "LEAST_MATCHED", 2)


def sampled(measure, small, calls=10, **settings):
    """The p-value or power, and how many rows verified n-grams and drafted tokens."""
    counted = Counter()

    @instead_of(Proposers, "after_answer")
    def counting(after_answer, self, answer):
        found, _ = result = after_answer(self, answer)
        counted.update(found.record.sources)
        return result

    with pytest.MonkeyPatch.context() as patch:
        counting(patch)
        value = measure(*small, calls=calls, prompt=SOME_PAIRS, **settings)
    assert min(counted[NGRAM], counted[PRIMARY]) > 0.1 * counted.total()
    return value


@pytest.mark.slow
def test_three_token_strings_have_the_targets_distribution(small, some_pairs):
    assert sampled(p_value, small, seed=31) > 1e-3


def uniform_instead_of_certain(monkeypatch):
    monkeypatch.setattr(proposers, "point_masses", lambda tokens, size: torch.full((*tokens.shape, size), 1 / size))


def the_drafts_q(monkeypatch):
    """The q of the tokens that the draft would have drawn in the places of an n-gram."""
    add, distributions = Completion.add, Proposers.distributions

    def of_all_rows(self, tokens, q, device):
        self.drafted = [len(tokens[0])] * len(tokens) if q is not None else self.drafted
        return distributions(self, tokens, q, device)

    monkeypatch.setattr(Proposers, "distributions", of_all_rows)

    def of_the_draft(self, depth, *drawn):
        ahead, self.ahead = self.ahead, None
        add(self, depth, *drawn)
        self.ahead = ahead

    monkeypatch.setattr(Completion, "add", of_the_draft)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [uniform_instead_of_certain, the_drafts_q])
def test_an_ngram_that_does_not_count_as_certain_is_noticed(small, some_pairs, monkeypatch, mutant):
    mutant(monkeypatch)
    assert sampled(power, small, seed=31) > 0.99
