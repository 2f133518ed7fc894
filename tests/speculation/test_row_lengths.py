"""A call lasts as long as its slowest row."""

import random
import statistics

import pytest

from hf_ssd.speculation.planner import Round
from hf_ssd.speculation.row_lengths import RowLengths

ACCEPTANCE, LOOKAHEAD = 0.6, 3
EXPECTED = [sum(ACCEPTANCE**i for i in range(k + 1)) for k in range(LOOKAHEAD + 1)]


def accepted(chance):
    return next((k for k in range(LOOKAHEAD) if chance.random() > ACCEPTANCE), LOOKAHEAD)


def call(row_lengths, limits, chance):
    """Drafts until each row has reached its limit, and returns how many rows were left in each round."""
    row_lengths.begin()
    gained, rounds = [0] * len(limits), []
    while any(n < limit for n, limit in zip(gained, limits)):
        counts = [accepted(chance) if n < limit else -1 for n, limit in zip(gained, limits)]
        gained = [n + k + 1 for n, k in zip(gained, counts)]
        row_lengths.observe(Round(LOOKAHEAD, counts, [True] * len(limits), ["prepared"] * len(limits)))
        rounds.append(sum(k >= 0 for k in counts))
    return rounds


@pytest.mark.parametrize("rows", [1, 2, 8, 32])
def test_calls_last_as_long_as_predicted(rows):
    chance, row_lengths = random.Random(0), RowLengths(rows)
    rounds = statistics.mean(len(call(row_lengths, [160] * rows, chance)) for _ in range(60))
    alike = 160 / EXPECTED[-1]  # as if all rows advanced alike
    rounds -= 0.5  # they are whole, and the last one gives more than is needed
    assert rounds / alike == pytest.approx(row_lengths.drafting_over_rest(EXPECTED), rel=0.02)
    if rows > 2:
        assert rounds / alike > 1.05  # the mutant: as if they did


@pytest.mark.parametrize("fixed_share", [0.0, 0.5])
def test_it_matters_less_where_fewer_rows_take_less(fixed_share):
    chance, row_lengths = random.Random(0), RowLengths(8)
    calls = [call(row_lengths, [160] * 8, chance) for _ in range(60)]
    seconds = statistics.mean(
        fixed_share * (len(rounds) - 0.5) + (1 - fixed_share) * (sum(rounds) / 8 - 0.5) for rounds in calls
    )
    over_alike = seconds / (160 / EXPECTED[-1])
    assert over_alike == pytest.approx(row_lengths.drafting_over_rest(EXPECTED, fixed_share), rel=0.02)
    assert row_lengths.drafting_over_rest(EXPECTED) > over_alike + 0.03  # the mutant: as if they did not


def test_it_matters_less_where_texts_end_by_themselves():
    chance, limited, free = random.Random(0), RowLengths(8), RowLengths(8)
    for _ in range(20):
        call(limited, [160] * 8, chance)
        call(free, [chance.randrange(20, 300) for _ in range(8)], chance)
    assert free.drafting_over_rest(EXPECTED) < 1.02 < 1.05 < limited.drafting_over_rest(EXPECTED)


def test_a_speculation_that_is_always_accepted_keeps_rows_together():
    assert RowLengths(8).drafting_over_rest([1.0, 2.0, 3.0]) == pytest.approx(1.0)


def test_a_row_falls_behind_the_others():
    row_lengths = RowLengths(3)
    row_lengths.begin()
    for accepted, behind in (([2, 2, 2], 0.0), ([0, 3, 3], 2.0), ([3, 0, 0], -2.0), ([2, -1, 0], 1.0)):
        row_lengths.observe(Round(3, accepted, [True] * 3, ["prepared"] * 3))
        assert row_lengths.fallen_behind == pytest.approx(behind)
