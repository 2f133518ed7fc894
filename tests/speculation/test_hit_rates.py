"""Hit rates by budget, from how often guesses were right."""

import pytest

from hf_ssd import SSDConfig
from hf_ssd.speculation.costs import Frequencies
from hf_ssd.speculation.hit_rates import EVERY, LARGEST_BUDGET, HitRates
from hf_ssd.speculation.planner import GUESSES, Round


def test_what_happens_more_often_becomes_more_likely():
    frequencies = Frequencies([0.5, 0.3], 4.0)
    assert frequencies.values.tolist() == pytest.approx([0.5, 0.3])
    for _ in range(1000):
        for which in (0, 1, 1, None, 7):  # 7 is none of them
            frequencies.observe(which)
    assert frequencies.values.tolist() == pytest.approx([0.2, 0.4], abs=0.02)


def test_the_best_outcomes_are_prepared_first():
    """Against the chances of all outcomes, one after the other."""
    rates = HitRates(SSDConfig())
    for number in range(300):
        k = number % 3
        rates.observe(Round(2, [k], [number % 2 == 0], ["prepared"], [number % 5], budget=4), [0.7, 0.6])
    rejection, end = rates.after_rejection.values, rates.at_the_end.values
    chances = [0.3 * chance for chance in rejection] + [0.7 * 0.4 * chance for chance in rejection]
    chances = sorted([*chances, *(0.7 * 0.6 * chance for chance in end)], reverse=True)
    predicted = rates.predicted([0.7, 0.6])
    assert len(predicted) == LARGEST_BUDGET
    for budget in (1, 2, 7, LARGEST_BUDGET):
        assert predicted[budget - 1] == pytest.approx(sum(chances[:budget]))


def test_without_drafted_tokens_there_is_one_place_to_guess():
    predicted = HitRates(SSDConfig()).predicted([])
    assert predicted[0] < predicted[GUESSES - 1] == predicted[-1] <= 1


@pytest.mark.parametrize("hit", [False, True])
def test_predictions_are_corrected_by_how_they_erred(hit):
    rates = HitRates(SSDConfig())
    predicted = rates.predicted([0.7])[3]
    for _ in range(40 * EVERY):
        rates.observe(Round(1, [-1, 0], [False, hit], ["prepared"] * 2, [None, 2], budget=4), [0.7])
    assert (rates.corrected(4, [predicted] * 4) > predicted) == hit


def test_what_follows_a_backup_is_kept_apart():
    rates = HitRates(SSDConfig())
    before = rates.after_rejection.values.tolist(), rates.overall.value
    rates.observe(Round(1, [0], [True], ["ngram"], [0], budget=4), [0.7])
    assert (rates.after_rejection.values.tolist(), rates.overall.value) == before
    assert rates.after_backup.value > 0.3
