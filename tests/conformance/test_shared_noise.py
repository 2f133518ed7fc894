"""Target and draft share the noise of bonus tokens, and the distribution stays what it is. Each trap has a mutant."""

import dataclasses

import pytest
import torch

import hf_ssd
from hf_ssd.drafting import drafts, outcome_candidates, sampling
from hf_ssd.drafting.cache_shapes import Confidence
from hf_ssd.drafting.sampling import SpeculationNoise
from hf_ssd.generation import deciding
from hf_ssd.generation.verification import Chance
from hf_ssd.noise import ACCEPTANCE, BONUS, places

from ..helpers.mutants import instead_of
from ..helpers.preparing import ahead, preparing
from ..helpers.sampled_strings import PROMPT, SMALL, WARPERS, chi_square, exact_probabilities, p_value, power, power_of
from ..helpers.suites import quick_first

FAVOURITE = 5  # the likeliest token of the target, which decides what is planned or prepared


def share_of_best_guesses(small):
    """How often the best guess after the right accepted count is the bonus token."""
    with preparing() as hits:
        assert p_value(*small, calls=4, seed=3, budget=4, fan_out="uniform") > 1e-3
    return sum(hits) / len(hits)


@pytest.mark.slow
def test_a_draft_that_knows_the_noise_hits_more_often(small, monkeypatch):
    with_noise = share_of_best_guesses(small)
    monkeypatch.setattr(sampling.DraftSampler, "bonus_noise", lambda *_: None)
    assert with_noise > 0.05 + share_of_best_guesses(small)


def luck_of_a_call(small, monkeypatch):
    """The numbers with which the target accepts drafted tokens in a call of several rows, and those of the draft."""
    seen = {Chance: {}, SpeculationNoise: {}}

    def noted(kind, places_of):
        of_acceptance = kind.of_acceptance

        def note(self, *args):
            numbers = of_acceptance(self, *args)
            for row, start, of_row in zip(*places_of(self, *args), numbers.tolist()):
                seen[kind].update({(row, start, depth): number for depth, number in enumerate(of_row)})
            return numbers

        monkeypatch.setattr(kind, "of_acceptance", note)

    noted(Chance, lambda self, _: (self.rows.tolist(), self.starts.tolist()))
    noted(SpeculationNoise, lambda _, rows, starts, __: (rows, [starts[row] for row in rows]))
    with preparing():
        assert p_value(*small, calls=1, seed=3, budget=4) > 1e-3
    return seen.values()


def test_a_draft_knows_with_which_numbers_its_tokens_are_accepted(small, monkeypatch):
    of_target, of_draft = luck_of_a_call(small, monkeypatch)
    assert len(of_target) > 500 and of_target.items() <= of_draft.items()


def test_numbers_of_another_purpose_are_noticed(small, monkeypatch):
    """The mutant for the test above."""
    monkeypatch.setattr(sampling, "ACCEPTANCE", BONUS)
    of_target, of_draft = luck_of_a_call(small, monkeypatch)
    assert not of_target.items() & of_draft.items()


def by_the_guess_behind(self, candidates, budget):
    """All of a row's budget for no accepted token, or for one, by the best guess after one."""
    counts = range(len(candidates.limits))
    first = [int(guesses[min(1, len(counts) - 1), 0] != FAVOURITE) for guesses in candidates.guesses]
    return [[budget * (k == min(only, len(counts) - 1)) for k in counts] for only in first]


def by_the_luck_behind(self, candidates, budget):
    """All of a row's budget for no accepted token if the last one has luck, and otherwise for all accepted tokens."""
    counts = range(len(candidates.limits))
    first = [0 if not of_row.size or of_row[-1] > -0.3 else counts[-1] for of_row in candidates.luck]
    return [[budget * (k == only) for k in counts] for only in first]


def where_misses_decide(measure, small, monkeypatch, fan_outs):
    """After a miss a row has no drafted token, unless its text repeats itself. Guesses depend on all of the noise."""
    monkeypatch.setattr(outcome_candidates, "AFTER_REJECTION", 1.0)
    monkeypatch.setattr(Confidence, "fan_outs", fan_outs)
    with preparing() as hits:
        found = measure(*small, calls=64, seed=6, budget=4, lookahead=2, fallback="ngram", at_least=1.0)
    assert 0.1 < sum(hits) / len(hits) < 0.9
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fan_outs", [by_the_guess_behind, by_the_luck_behind])
def test_misses_that_decide_what_is_drafted_leave_the_distribution(small, monkeypatch, fan_outs):
    assert where_misses_decide(p_value, small, monkeypatch, fan_outs) > 1e-3


def by_position(monkeypatch):
    """Numbers of a position, whichever round comes to it: then what is prepared depends on those of later rounds."""

    def of_draws(self, depths):
        return self.noise.exponential(places(BONUS, self.rows[:, None], self.starts[:, None] + self.depth + depths, 0))

    def bonus_noise(self, _, starts, counts):
        rows, depths = torch.arange(len(starts))[:, None], torch.arange(counts)
        return self.noise.noise.exponential(places(BONUS, rows, torch.tensor(starts)[:, None] + depths, 0))

    def of_acceptance(noise, rows, starts, lookahead, depth=0):
        depths = depth + torch.arange(lookahead)
        return noise.uniform(places(ACCEPTANCE, rows[:, None], starts[:, None] + depths, 0))

    def of_target(self, lookahead):
        return of_acceptance(self.noise, self.rows, self.starts, lookahead, self.depth)

    def of_draft(self, rows, starts, lookahead):
        return of_acceptance(self.noise, torch.tensor(rows), torch.tensor(starts), lookahead)

    monkeypatch.setattr(Chance, "of_acceptance", of_target)
    monkeypatch.setattr(SpeculationNoise, "of_acceptance", of_draft)
    monkeypatch.setattr(Chance, "of_draws", of_draws)
    monkeypatch.setattr(sampling.DraftSampler, "bonus_noise", bonus_noise)


@pytest.mark.slow
@pytest.mark.parametrize("fan_outs", [by_the_guess_behind, by_the_luck_behind])
def test_noise_of_a_position_that_several_rounds_may_come_to_is_noticed(small, monkeypatch, fan_outs):
    """The mutant for the test above."""
    by_position(monkeypatch)
    assert where_misses_decide(power, small, monkeypatch, fan_outs) > 0.99


def of_bonus_tokens(monkeypatch):
    """Drafted tokens are drawn with the noise of the bonus token that replaces them after a rejection."""
    monkeypatch.setattr(sampling, "DRAFTED", BONUS)


@instead_of(deciding, "Chance")
def of_one_place(chance, noise, rows, starts, *depth):
    """Every committed token of a row is drawn with the same noise, as after a cut that forgets where the row is."""
    return chance(noise, rows, 0 * starts, *depth)


@instead_of(deciding, "Chance")
def of_two_rounds(chance, noise, rows, starts, *depth):
    """Two rounds share a start where a row gained a single token in the first, as after a cut of this token."""
    return chance(noise, rows, starts // 2 * 2, *depth)


def favourites_by_noise(monkeypatch):
    """Saguaro sampling makes those tokens less likely that the target's noise favours, so that q depends on it."""
    gather, seen = SpeculationNoise.gather, {}

    def noted(self, rows, starts, depth):
        where = torch.tensor([(row, start, depth) for row in rows for start in starts[row]]).T
        seen["noise"] = self.noise.exponential(places(BONUS, *where)).view(len(rows), -1, self.noise.vocab_size)
        return gather(self, rows, starts, depth)

    def by_noise(probabilities, fan_out, c):
        favoured = (probabilities / seen["noise"].view_as(probabilities)).topk(fan_out, dim=-1).indices
        scaled = probabilities.scatter(-1, favoured, probabilities.gather(-1, favoured) * c)
        return scaled / scaled.sum(-1, keepdim=True)

    monkeypatch.setattr(SpeculationNoise, "gather", noted)
    monkeypatch.setattr(sampling, "saguaro", by_noise)


MUTANTS = [  # and settings of checks in `test_sampled.py`, some of which have more calls
    (of_one_place, {"calls": 6}),
    (of_bonus_tokens, {"calls": 16}),
    (of_two_rounds, {"calls": 6}),
    (favourites_by_noise, {"calls": 16, "seed": 10, "budget": 4, "saguaro_c": 0.3}),
]


@pytest.mark.parametrize("mutate, settings", quick_first(MUTANTS))
def test_noise_that_two_choices_share_is_noticed(small, mutate, settings, monkeypatch):
    mutate(monkeypatch)
    assert power(*small, **settings) > 0.99


# ---------------------------------------------------------------- a seed that is set again


def second_calls(measure, small, pairs=500):
    """
    Of the second token in calls with the seed of the call before. They draft it if it was `FAVOURITE` there, and the
    call before does not, so its token was drawn with the noise of a bonus token.
    """
    (target, draft), counts, lookahead = small, torch.zeros(SMALL), [0]

    def planned(plan, config):
        return dataclasses.replace(ahead(plan, config), lookahead=lookahead[0], after_miss=lookahead[0])

    config = hf_ssd.SSDConfig(asynchronous=False)
    options = {"max_new_tokens": 3, "do_sample": True, "assistant_model": draft, "ssd_config": config}
    with preparing(planned):
        for seed in range(pairs):
            lookahead[0] = 0
            for _ in range(2):
                torch.manual_seed(seed)
                token = int(target.generate(PROMPT, **WARPERS, **options)[0, PROMPT.shape[1] + 1])
                lookahead[0] = int(token == FAVOURITE)
            counts[token] += 1
    return measure(counts, exact_probabilities(target).view(SMALL, -1).sum(1))


@pytest.mark.slow
def test_a_seed_that_is_set_again_leaves_the_distribution(small):
    assert second_calls(chi_square, small) > 1e-3


@pytest.mark.slow
def test_a_seed_that_gives_a_planned_call_the_same_noise_again_is_noticed(small, monkeypatch):
    """The mutant for the test above."""
    monkeypatch.setattr(drafts, "SEED_STEP", 0)
    assert second_calls(power_of, small) > 0.99
