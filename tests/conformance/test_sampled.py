"""Sampled outputs are distributed as the target's own samples, whatever is planned."""

import random

import pytest
import torch

from hf_ssd.cache.trial import check_supported
from hf_ssd.drafting import cache_shapes
from hf_ssd.drafting.autoregressive_drafter import AutoregressiveDrafter
from hf_ssd.drafting.sampling import DraftSampler
from hf_ssd.generation import deciding, verification
from hf_ssd.generation.proposers import ngrams
from hf_ssd.generation.proposers.random_tokens import RandomFallback
from hf_ssd.planning.cost_model import CostModel
from hf_ssd.rounds import AHEAD

from ..helpers.comparing import generate
from ..helpers.families import sharp_pair
from ..helpers.mutants import instead_of
from ..helpers.preparing import Whims, preparing
from ..helpers.sampled_strings import SMALL, p_value, power
from ..helpers.tiny import padded_batch
from .test_hybrids import states_without_a_copy

SAMPLED = {"do_sample": True, "top_k": 5, "max_new_tokens": 60}
SCALED = {"lookahead": 4, "saguaro_c": 0.5, "budget": "auto"}


def sampled_with_a_seed(target, model):
    torch.manual_seed(12)
    return generate(target, model, padded_batch(2), SCALED, **SAMPLED)


@pytest.mark.slow
def test_different_draft_randomness_is_noticed(target, draft, monkeypatch):
    """The mutant for the sampled calls of `matrix.py`: a draft whose tokens depend on more than seed and place."""
    expected = sampled_with_a_seed(target, draft).sequences

    @instead_of(AutoregressiveDrafter, "complete")
    def other_seed(complete, self, *args):
        self.sampler.noise.noise.first += 1
        self.sampler.noise.known.clear()
        return complete(self, *args)

    other_seed(monkeypatch)
    assert not torch.equal(sampled_with_a_seed(target, draft).sequences, expected)


@pytest.fixture
def budgets_by_chance(monkeypatch):
    """The planner chooses budgets by what things take; here that changes all the time."""
    chance = random.Random(1)
    by_chance = lambda costs, lookahead, budgets, *_: {(AHEAD, lookahead, b, 0): chance.random() for b in budgets}  # noqa: E731
    monkeypatch.setattr(CostModel, "ahead", by_chance)


@pytest.mark.slow
def test_the_clock_does_not_shape_the_tokens_of_saguaro_sampling(target, draft, assistant, budgets_by_chance):
    """Drafted tokens are made less likely by their number of guesses, which is not the budget of the planner."""
    in_turn = sampled_with_a_seed(target, draft)
    for _ in range(3):
        output = sampled_with_a_seed(target, assistant)
        stats = output.ssd_stats
        assert torch.equal(output.sequences, in_turn.sequences)
        assert stats.column("accepted") == in_turn.ssd_stats.column("accepted")
        assert stats.tokens_per_round > 1.1 and len(set(stats.column("budget"))) > 1
        assert any(hit for row in stats.column("hits") for hit in row)


@pytest.mark.slow
def test_scaling_by_the_budget_of_the_planner_is_noticed(target, draft, assistant, monkeypatch, budgets_by_chance):
    """The mutant for the test above, in this process only: the budget that was planned by the clock."""

    def by_the_clock(self, plan):
        return cache_shapes.best_fan_out(plan.lookahead, max(1, plan.budget), 0.8, 0.5)

    monkeypatch.setattr(DraftSampler, "_fan_outs", by_the_clock)
    with pytest.raises(AssertionError):
        test_the_clock_does_not_shape_the_tokens_of_saguaro_sampling(target, draft, assistant, None)


# ---------------------------------------------------------------- the distribution


def test_three_token_strings_have_the_targets_distribution(small):
    assert p_value(*small, calls=16) > 1e-3


def small_hybrids(family):
    pair = sharp_pair(family, noise=0.02, vocab_size=SMALL)
    with torch.no_grad():
        for model in pair:
            model.get_output_embeddings().weight.mul_(0.4)
    return pair


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_a_hybrid_pair_leaves_the_targets_distribution(family, prepared_in_process):
    assert p_value(*small_hybrids(family), calls=12, seed=4) > 1e-3
    assert 0.1 < sum(prepared_in_process) / len(prepared_in_process) < 0.95


@pytest.mark.slow
def test_a_state_that_is_not_copied_changes_the_distribution(monkeypatch):
    """The mutant for the test above: a verification changes the checkpoint of the target."""
    pair = small_hybrids("qwen3_next")
    check_supported(pair[0])
    states_without_a_copy(monkeypatch)
    assert power(*pair, calls=12, seed=4) > 0.99


class LatestTokens:
    """A fallback of a user's own: the last tokens again, or a distribution around them."""

    def __init__(self, certain):
        self.certain, self.generator = certain, torch.Generator().manual_seed(5)

    def propose(self, input_ids, lookahead):
        tokens = input_ids[:, -2:]
        if self.certain:
            return tokens, None
        probabilities = torch.nn.functional.one_hot(tokens, SMALL) * 0.4 + 0.6 / SMALL
        drawn = torch.multinomial(probabilities[0], 1, generator=self.generator).T
        return drawn, probabilities


SETTINGS = {
    "C = 0": {"saguaro_c": 0.0},
    "C = 0.3": {"saguaro_c": 0.3},
    "n-grams": {"fallback": "ngram", "at_least": 1.0},
    "random": {"fallback": "random"},
    "custom, certain": {"fallback": LatestTokens(certain=True)},
    "custom, drawn": {"fallback": LatestTokens(certain=False)},
    "auto": {"lookahead": "auto", "budget": "auto", "at_least": 1.01},
}


@pytest.fixture
def drafting(monkeypatch):
    """The plan always drafts, although plain decoding of so small models is faster."""
    monkeypatch.setattr(CostModel, "plain", lambda *_: 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_leaves_the_targets_distribution(small, name, prepared_in_process, drafting):
    assert p_value(*small, calls=16, seed=10, **{"budget": 4, **SETTINGS[name]}) > 1e-3
    assert name == "auto" or 0.1 < sum(prepared_in_process) / len(prepared_in_process) < 0.95


def under_whims(measure, small, monkeypatch):
    whims = Whims()
    monkeypatch.setattr(ngrams, "LEAST_MATCHED", 2)  # so short texts have no longer matches
    with preparing(whims.planned, whims.outcome_arrived) as hits:
        found = measure(*small, calls=24, seed=6, saguaro_c=0.5)
    assert 0.1 < sum(hits) / len(hits) < 0.9
    return found


@pytest.mark.slow
def test_whatever_is_planned_leaves_the_targets_distribution(small, monkeypatch):
    assert under_whims(p_value, small, monkeypatch) > 1e-3


@instead_of(deciding, "verify_sampled")
def accept_greedily(_, scores, q, drafted, uniform):
    """The reference engine's rule for speculations that missed: accept what equals the likeliest token."""
    p = scores.softmax(-1)
    accepted = verification.accepted_counts(p[:, :-1].argmax(-1) == drafted)
    bonus = torch.multinomial(p[torch.arange(len(p)), accepted], 1).squeeze(1)
    return accepted, bonus, torch.zeros_like(accepted)


@instead_of(verification, "residual_distribution")
def without_q_in_the_residual(_, p, q, drafted, accepted):
    """The next token is drawn from p although the drafted one was rejected, so it may come again."""
    return p[torch.arange(len(accepted)), accepted]


def unwarped_q(monkeypatch):
    process, draw = DraftSampler.process, DraftSampler.draw

    def remember(self, scores, *args):
        self.raw = scores
        return process(self, scores, *args)

    def mutant(self, *args):
        return draw(self, *args)[0], self.raw.softmax(-1)

    monkeypatch.setattr(DraftSampler, "process", remember)
    monkeypatch.setattr(DraftSampler, "draw", mutant)


@instead_of(deciding, "verify_sampled")
def another_rows_q(verify, scores, q, drafted, uniform):
    return verify(scores, None if q is None else q.roll(1, 0), drafted, uniform)


@instead_of(DraftSampler, "draw")
def plain_q_with_saguaro_tokens(draw, self, scores, *args):
    return draw(self, scores, *args)[0], scores.softmax(-1)


@instead_of(RandomFallback, "propose")
def drafts_q_with_random_tokens(propose, self, *request):
    favourite = torch.nn.functional.one_hot(torch.tensor(2), self.vocab_size) * 0.5 + 0.5 / self.vocab_size
    return [one._replace(probabilities=favourite.expand_as(one.probabilities)) for one in propose(self, *request)]


MUTANTS = {  # and the number of calls
    accept_greedily: 6,
    unwarped_q: 12,
    without_q_in_the_residual: 6,
    another_rows_q: 6,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant, settings",
    [(plain_q_with_saguaro_tokens, {"saguaro_c": 0.3}), (drafts_q_with_random_tokens, {"fallback": "random"})],
)
def test_a_wrong_q_of_saguaro_sampling_or_a_fallback_fails_the_same_test(
    small, mutant, settings, prepared_in_process, monkeypatch
):
    mutant(monkeypatch)
    assert power(*small, calls=4, seed=10, **{"budget": 4, **settings}) > 0.99


@pytest.mark.slow
def test_a_wrong_q_under_whims_fails_the_same_test(small, monkeypatch):
    plain_q_with_saguaro_tokens(monkeypatch)
    assert under_whims(power, small, monkeypatch) > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("mutate, calls", MUTANTS.items())
def test_plausible_mistakes_fail_the_same_test(small, mutate, calls, monkeypatch):
    """With fewer calls already."""
    mutate(monkeypatch)
    assert power(*small, calls=calls) > 0.99
