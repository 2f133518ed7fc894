"""Which plans are predicted at all, and how late a draft is predicted to be."""

import math
import random
import statistics

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hf_ssd import SSDConfig
from hf_ssd.speculation.corrections import kind_of
from hf_ssd.speculation.measurements import LONGEST_LOOKAHEAD, Measurements
from hf_ssd.speculation.planner import Round
from hf_ssd.speculation.predictions import LOOKAHEADS, Moment, Predictions

SECONDS = st.floats(1e-4, 1e-1)


def measured(config, acceptance, verification, per_token, step, per_branch, contention):
    """What is known of a pair after many rounds."""
    measured = Measurements(config, 1)
    for position, chance in zip(measured.accepted, acceptance):
        position.restart(chance, 1e4)
    for tokens in (1, 8) * 20:
        measured.verification_alone.observe(tokens, verification + per_token * tokens)
        measured.verification_beside.observe(tokens, contention * (verification + per_token * tokens))
        measured.step.observe(tokens, step + per_branch * tokens)
        measured.branches.observe(tokens, step + per_branch * tokens)
    return measured


@given(
    st.booleans(),
    st.lists(st.floats(0.05, 0.99), min_size=LONGEST_LOOKAHEAD, max_size=LONGEST_LOOKAHEAD),
    st.tuples(SECONDS, st.floats(1e-5, 1e-2), SECONDS, st.floats(1e-6, 1e-3), st.floats(1.0, 2.0)),
)
@example(False, [0.9] * LONGEST_LOOKAHEAD, (0.1, 1e-5, 0.01, 1e-6, 1.0))
@example(True, [0.8] * LONGEST_LOOKAHEAD, (0.1, 1e-5, 0.02, 1e-6, 1.0))  # best with 4 in turn, and with 5 ahead
def test_no_plan_that_is_left_out_would_be_faster(asynchronous, acceptance, costs):
    config = SSDConfig(asynchronous=asynchronous)
    predictions = Predictions(config, measured(config, acceptance, *costs), 1000, sampled=True, drafts=1)
    every_lookahead = {
        (lookahead, budget): round_
        for lookahead in LOOKAHEADS
        for budget, round_ in predictions.of_lookahead(lookahead, Moment(predictions.measured)).items()
    }
    best_of_all, best = (
        {
            kind_of(*plan): max(t / s for other, (t, s) in rounds.items() if kind_of(*other) == kind_of(*plan))
            for plan in rounds
            if plan[0]
        }
        for rounds in (every_lookahead, predictions.of_all_plans())
    )
    assert best == pytest.approx(best_of_all, rel=1e-3)


def test_long_speculations_are_not_predicted_where_short_ones_are_best():
    known = measured(SSDConfig(), [0.5] * 16, 0.008, 5e-4, 0.002, 5e-5, 1.1)
    predictions = Predictions(SSDConfig(), known, 1000, sampled=True, drafts=1)
    assert max(k for k, _ in predictions.of_all_plans()) < LOOKAHEADS[-1]


@pytest.mark.parametrize("counts_it", [True, False])  # the second is the mutant
def test_a_draft_that_is_hardly_done_in_time_is_late_more_often(counts_it, monkeypatch):
    """Verification takes longer than the branches on average; but not in every round."""
    if not counts_it:
        monkeypatch.setattr(Measurements, "lateness", lambda self, busy: 0.0)
    known, chance = measured(SSDConfig(), [0.8] * 16, 0.005, 1e-4, 0.0008, 3e-5, 1.0), random.Random(1)
    transits = {4: [], 24: []}
    for number in range(4000):
        budget = 24 if number // 50 % 2 else 4
        seconds = 0.0053 * math.exp(chance.gauss(0.0, 0.3))
        transit = 3e-4 + max(0.0, 3 * (0.0008 + 3e-5 * budget) - seconds)
        known.observe(Round(3, [2], [True], ["prepared"], [0], seconds, budget, seconds + transit, transit))
        transits[budget].append(transit)
    later = statistics.fmean(transits[24]) - statistics.fmean(transits[4])
    predicted = known.lateness(known.busy(3, 24)) - known.lateness(known.busy(3, 4))
    assert (predicted == pytest.approx(later, rel=0.2)) == counts_it

    def seconds_of(budget):
        rounds = Predictions(SSDConfig(), known, 1000, sampled=True, drafts=1).of_lookahead(3, Moment(known), 1.0)
        return rounds[budget][1]

    assert (seconds_of(24) - seconds_of(4) == pytest.approx(later, rel=0.2)) == counts_it
