"""The formulas against values by hand and against brute force. Each comparison with brute force comes with mutants of
the formula that it must tell apart, so that none of them can pass for want of sharpness."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_ssd import SSDStats, theory
from hf_ssd.rounds import AHEAD, PREPARED, PRIMARY, RoundRecord

rates = st.floats(0, 1)
inner_rates = st.floats(0.05, 0.95)
times = st.floats(0, 3)
tokens = st.floats(1, 8)


BY_HAND = [  # what is not compared with brute force below, and edges
    (theory.acceptance_rate([0.5, 0.5, 0.0], [0.2, 0.3, 0.5]), 0.5),
    (theory.expected_tokens(1.0, 7), 8),
    (theory.speculative_decoding_speedup(4.0, 0.6), 2.5),
    (theory.overall_hit_rate(0.0, 1.0), 0.5),  # hit and miss by turns
    (theory.overall_hit_rate(1.0, 0.0), 1),  # stays where it starts: documented
    (theory.ssd_over_speculative_decoding(0.5, 1.0), 4 / 3),  # Corollary 8
    (theory.ssd_over_speculative_decoding_bound(0.5, 4.0, 4.0), 1.5),
    (theory.critical_batch_size(0.7, 0.3, 3.0, 3.0), 0),  # a free backup as good as the primary always wins
    # The backup's 3 tokens of 4 are not worth a wait of 1/4 even if every round waits: 3 < 4 / 1.25.
    (theory.critical_batch_size(0.5, 0.25, 4.0, 2.0), math.inf),
    (theory.fan_out_for([0.5, 0.0, 0.5], 4, 0.7), [2, 0, 2]),
]


def test_values_by_hand():
    for found, expected in BY_HAND:
        assert found == pytest.approx(expected)


@st.composite
def distribution_pairs(draw):
    size = draw(st.integers(1, 6))
    pair = [draw(st.lists(st.floats(0.01, 1), min_size=size, max_size=size)) for _ in "pq"]
    return [[weight / math.fsum(weights) for weight in weights] for weights in pair]


@given(distribution_pairs())
def test_acceptance_rate_is_what_the_rule_of_acceptance_gives(pair):
    p, q = pair
    # Draw x from q, accept with min(1, p/q): the rule itself, not its simplification.
    assert theory.acceptance_rate(p, q) == pytest.approx(sum(y * min(1, x / y) for x, y in zip(p, q)))
    assert theory.acceptance_rate(p, q) == pytest.approx(1 - sum(abs(x - y) for x, y in zip(p, q)) / 2)


def accepted_counts(rates):
    """Chance of each accepted count, by going through all patterns of tokens that would and would not be accepted."""
    chances = [0.0] * (len(rates) + 1)
    for pattern in itertools.product([True, False], repeat=len(rates)):
        chance = math.prod(rate if good else 1 - rate for rate, good in zip(rates, pattern))
        chances[(*pattern, False).index(False)] += chance
    return chances


@given(st.integers(0, 6), rates)
def test_expectations_and_outcomes_are_those_of_all_patterns(lookahead, rate):
    chances = accepted_counts([rate] * lookahead)
    assert theory.outcome_probabilities(rate, lookahead) == pytest.approx(chances)
    expected = sum((k + 1) * chance for k, chance in enumerate(chances))
    assert theory.expected_tokens(rate, lookahead) == pytest.approx(expected)


@pytest.mark.parametrize("rows, acceptance", [(2, [0.6]), (4, [0.6]), (8, [0.8, 0.7, 0.5]), (8, [0.9] * 6)])
def test_expected_tokens_of_the_slowest_row_are_near_those_of_many_calls(rows, acceptance, rounds=64, calls=2000):
    chances = accepted_counts(acceptance)
    gained = np.random.default_rng(0).choice(len(chances), (calls, rows, rounds), p=chances) + 1
    slowest, expected = gained.mean(2).min(1).mean(), theory.expected_tokens_by_lookahead(acceptance)
    told = theory.expected_tokens_of_slowest_row(expected, rows, rounds)
    assert told == pytest.approx(slowest, rel=0.06) and told < slowest < expected[-1]  # by a bound on the largest of b
    assert theory.expected_tokens_of_slowest_row(expected, 1, rounds) == expected[-1]


@given(st.lists(st.tuples(rates, rates), max_size=6))
def test_expected_tokens_by_lookahead_and_of_trees_are_those_of_all_patterns(pairs):
    rates, caught = ([pair[i] for pair in pairs] for i in range(2))
    of_chains = [
        sum((k + 1) * chance for k, chance in enumerate(accepted_counts(rates[:n]))) for n in range(len(rates) + 1)
    ]
    of_siblings = sum(chance * one for chance, one in zip(accepted_counts(rates), caught))
    assert theory.expected_tokens_by_lookahead(rates) == pytest.approx(of_chains)
    assert theory.expected_tokens_of_tree(rates, caught) == pytest.approx(of_chains[-1] + of_siblings)


@given(rates, tokens, tokens, times, times, st.integers(1, 5))
def test_ssd_speedup_is_tokens_over_time_of_all_patterns_of_hits(p, expected_hit, expected_miss, primary, backup, rows):
    gained = spent = 0.0
    for hits in itertools.product([True, False], repeat=rows):
        chance = math.prod(p if hit else 1 - p for hit in hits)
        gained += chance * sum(expected_hit if hit else expected_miss for hit in hits) / rows
        spent += chance * (max(1, primary) if all(hits) else 1 + backup)
    speedup = theory.ssd_speedup(p, expected_hit, expected_miss, primary, backup, rows)
    assert speedup == pytest.approx(gained / spent)


@given(rates, rates)
def test_overall_hit_rate_is_where_the_chain_settles(p_primary, p_backup):
    assume(0.02 < 1 - p_primary + p_backup < 1.98)  # or the chain settles too slowly, or never
    share = 0.5
    for _ in range(1000):
        share = share * p_primary + (1 - share) * p_backup
    assert theory.overall_hit_rate(p_primary, p_backup) == pytest.approx(share, abs=1e-6)


@given(rates, times, times, tokens)
def test_corollary_8_is_the_ratio_of_the_two_speedups(p, draft_time, primary_time, expected):
    ratio = theory.ssd_over_speculative_decoding(p, draft_time, primary_time)
    ssd = theory.ssd_speedup(p, expected, expected, primary_time, backup_time=draft_time)
    assert ratio == pytest.approx(ssd / theory.speculative_decoding_speedup(expected, draft_time))
    formula = (1 + draft_time) / (p * max(1, primary_time) + (1 - p) * (1 + draft_time))
    assert ratio == pytest.approx(formula)
    if primary_time <= 1 + draft_time:
        assert ratio >= 1 - 1e-12
    assert theory.ssd_over_speculative_decoding(p, draft_time) >= 1 - 1e-12


def allocations(parts, total):
    """All ways to write the total as a sum of as many whole numbers >= 0, in order."""
    if parts == 1:
        return [(total,)]
    return [(first, *rest) for first in range(total + 1) for rest in allocations(parts - 1, total - first)]


def power_law_hit_rate(probabilities, fan_outs, r):
    return sum(p * (1 - f**-r) for p, f in zip(probabilities, fan_outs) if p)


def is_best_allocation(probabilities, budget, r, shares, steps=48):
    """Whether no allocation on a grid of `budget / steps` beats the shares under a miss rate of F^-r."""
    grid = [[n * budget / steps for n in counts] for counts in allocations(len(probabilities), steps) if all(counts)]
    best = max(power_law_hit_rate(probabilities, fan_outs, r) for fan_outs in grid)
    return power_law_hit_rate(probabilities, shares, r) >= best - 1e-12


def in_proportion(weights, budget):
    return [budget * weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("a, r", [(0.8, 0.5), (0.5, 1.0), (0.9, 0.3)])
def test_geometric_fan_out_is_theorem_12(a, r):
    """It is the best allocation, because `fan_out_for` gives the same for these outcomes."""
    lookahead, budget = 2, 12
    shares = theory.geometric_fan_out(lookahead, budget, a, r)
    assert sum(shares) == pytest.approx(budget)
    assert shares == pytest.approx(theory.fan_out_for(theory.outcome_probabilities(a, lookahead), budget, r))
    assert shares[1] / shares[0] == pytest.approx(a ** (1 / (1 + r)))
    assert shares[2] / shares[0] == pytest.approx(a ** (2 / (1 + r)) * (1 - a) ** (-1 / (1 + r)))


SKEWED = [0.7, 0.05, 0.25]  # as after a backup: mostly nothing accepted


@pytest.mark.parametrize("r", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("probabilities", [SKEWED, [0.25, 0.75], [0.1, 0.2, 0.3, 0.4]])
def test_fan_out_for_is_the_best_allocation(probabilities, r):
    budget = 10
    shares = theory.fan_out_for(probabilities, budget, r)
    assert sum(shares) == pytest.approx(budget)
    assert is_best_allocation(probabilities, budget, r, shares)
    wrong = [1, 0, 1 / (2 + r), *([r / (1 + r)] if r != 1 else [])]  # where 1/(1+r) and r/(1+r) differ
    for exponent in wrong:
        mutant = in_proportion([p**exponent for p in probabilities], budget)
        assert not is_best_allocation(probabilities, budget, r, mutant)


def with_primary(p, primary_time, expected_hit, batch_size):
    return theory.ssd_speedup(p, expected_hit, expected_hit, primary_time, primary_time, rows=batch_size)


def with_backup(p, primary_time, expected_hit, expected_miss, batch_size):
    return theory.ssd_speedup(p, expected_hit, expected_miss, primary_time, 0.0, rows=batch_size)


def crossing(p, primary_time, expected_hit, expected_miss):
    """The batch size at which the backup begins to win, by bisection; infinite if it does not in any batch."""

    def backup_wins(b):
        primary = with_primary(p, primary_time, expected_hit, b)
        return with_backup(p, primary_time, expected_hit, expected_miss, b) > primary

    if not backup_wins(1e9):
        return math.inf
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if backup_wins(middle) else (middle, high)
    return low


@given(inner_rates, st.floats(0.05, 1), st.floats(0.05, 7), st.floats(1, 3))
def test_critical_batch_size_is_where_the_curves_cross(p, primary_time, more, expected_miss):
    expected_hit = expected_miss + more
    lost = expected_hit / (p * expected_hit + (1 - p) * expected_miss) - 1
    assume(abs(lost / primary_time - 1) > 1e-3)  # or the crossing is at such a distance that rounding decides
    b = theory.critical_batch_size(p, primary_time, expected_hit, expected_miss)
    assert b == pytest.approx(crossing(p, primary_time, expected_hit, expected_miss), rel=1e-6, abs=1e-6)
    for batch_size in range(1, 30):
        if abs(batch_size - b) > 1e-3 and p**batch_size > 1e-6:
            primary = with_primary(p, primary_time, expected_hit, batch_size)
            backup = with_backup(p, primary_time, expected_hit, expected_miss, batch_size)
            assert (backup > primary) == (batch_size > b)


def test_critical_batch_size_at_its_edges_and_mutants():
    found = crossing(0.5, 0.5, 4.0, 2.0)  # E_hit 4 and E_miss 2 make 3 tokens on average: log(1 + 2 - 2 * 4/3) / log p
    assert found == pytest.approx(math.log2(3)) and crossing(0.5, 0.25, 4.0, 2.0) == math.inf
    for mutant in (1 + 1 / 0.5 - 4 / 3, 1 + 1 / 0.5 - 4 / (0.5 * 3.5), 3):  # E_hit not over T_p, p, and the sign
        assert found != pytest.approx(math.log(mutant) / math.log(0.5))
    assert theory.critical_batch_size(0.5, 1 / 3, 4.0, 2.0) > 50  # where the two tie in the limit
    # A preparation that is not hidden slows hits as well, which Theorem 17 leaves out: documented.
    assert theory.critical_batch_size(0.5, 2.0, 4.0, 2.0) != pytest.approx(crossing(0.5, 2.0, 4.0, 2.0), rel=0.1)


several_fan_outs = st.lists(st.floats(1, 100), min_size=2, max_size=10, unique=True)


@given(several_fan_outs, st.floats(0.1, 1), st.floats(0.05, 2), st.integers(0, 3))
def test_fit_recovers_a_power_law_and_ignores_zeros(fan_outs, scale, exponent, zeros):
    assume(max(fan_outs) / min(fan_outs) > 1.1)
    misses = [scale * f**-exponent for f in fan_outs]
    fitted = theory.fit_power_law(fan_outs + [1000.0] * zeros, misses + [0.0] * zeros)
    assert fitted == pytest.approx((scale, exponent))
    assert fitted != pytest.approx((scale, exponent + 0.01)) and fitted != pytest.approx((scale * 1.01, exponent))


def test_fit_is_the_least_squares_of_logarithms():
    fan_outs, misses = [1, 2, 4, 8, 8], [0.9, 0.5, 0.42, 0.2, 0.3]

    def squares(scale, exponent):
        return sum((math.log(miss / scale) + exponent * math.log(f)) ** 2 for f, miss in zip(fan_outs, misses))

    scale, exponent = theory.fit_power_law(fan_outs, misses)
    for up, steeper in itertools.product((-0.001, 0, 0.001), repeat=2):
        assert squares(scale, exponent) <= squares(scale + up, exponent + steeper)


def stats_of(accepted, hits, wait_seconds, verify_seconds):
    """The records that predict() reads."""
    records = []
    for counts, hits_of_rows, wait, verify in zip(accepted, hits, wait_seconds, verify_seconds):
        sources = [PREPARED if hit else PRIMARY for hit in hits_of_rows]
        record = RoundRecord(AHEAD, 5, 8, sources, accepted=counts, wait_seconds=wait, verify_seconds=verify)
        records.append(record)
    return SSDStats(records=records)


rounds_of_a_row = st.tuples(st.integers(0, 5), st.booleans(), st.floats(0, 2), st.floats(0.1, 2))


@given(st.lists(rounds_of_a_row, min_size=1, max_size=12))
def test_predict_of_one_row_adds_up_whatever_occurred(rounds):
    accepted, hits, waits, verifications = zip(*rounds)
    stats = stats_of([[k] for k in accepted], [[hit] for hit in hits], waits, verifications)
    gained = sum(accepted + 1 for accepted, _, _, _ in rounds)
    spent = sum(wait + verify for _, _, wait, verify in rounds)
    assert theory.predict(stats) == pytest.approx(gained / spent)


def test_predict_of_a_batch_by_hand():
    stats = stats_of(
        accepted=[[3, 1], [2, 0], [0, -1], [1, -1], []],  # stopped before the last speculation was verified
        hits=[[True, True], [True, False], [False, True], [True, False], [False, False]],
        wait_seconds=[0.1, 0.7, 0.5, 0.3, 100.0],
        verify_seconds=[1.0, 3.0, 2.0, 2.0, 0.0],
    )
    # Rows that count: hits gained 4, 2, 3 and 2, misses 1 and 1. Finished rows' hits do not count, in rounds neither.
    p, expected_hit, expected_miss, rows = 4 / 6, 11 / 4, 1.0, 6 / 4
    verify, wait_hit, wait_miss = 2.0, 0.2, 0.6
    all_hit = p**rows
    gained = p * expected_hit + (1 - p) * expected_miss
    per_round = all_hit * (verify + wait_hit) + (1 - all_hit) * (verify + wait_miss)
    assert theory.predict(stats) == pytest.approx(rows * gained / per_round)
    measured_share = (2 * (verify + wait_hit) + 2 * (verify + wait_miss)) / 4
    assert theory.predict(stats) != pytest.approx(rows * gained / measured_share)  # Corollary 16 takes p^b
    assert theory.predict(stats) != pytest.approx(2 * gained / per_round)  # a finished row gains nothing


def test_predict_takes_what_rounds_there_are_and_refuses_none():
    # Corollary 16 expects all to hit in a quarter of the rounds, so it needs a wait for them: 2 rows, 3 + 1 tokens.
    stats = stats_of([[2, 0], [0, 2]], [[True, False], [False, True]], [0.5, 0.5], [1.0, 1.0])
    assert theory.predict(stats) == pytest.approx(4 / 1.5)
    stats = stats_of([[1], [-1]], [[True], [True]], [0.0, 9.0], [0.5, 9.0])
    assert theory.predict(stats) == pytest.approx(4)
    with pytest.raises(ValueError, match="no verified round"):
        theory.predict(SSDStats())
    with pytest.raises(ValueError, match="no verified round"):
        theory.predict(stats_of([[-1]], [[True]], [0.1], [0.1]))


OUT_OF_RANGE = [  # which argument is named, the function and its arguments
    ("`p`", theory.acceptance_rate, [0.5, 0.4], [0.5, 0.5]),
    ("`q`", theory.acceptance_rate, [0.5, 0.5], [1.5, -0.5]),
    ("both must list", theory.acceptance_rate, [1.0], [0.5, 0.5]),
    ("acceptance_rate", theory.expected_tokens, math.nan, 3),
    ("lookahead", theory.expected_tokens, 0.5, -1),
    ("acceptance_rates", theory.expected_tokens_by_lookahead, [0.5, 1.1]),
    ("caught", theory.expected_tokens_of_tree, [0.5], [1.1]),
    ("acceptance_rate", theory.outcome_probabilities, -0.1, 3),
    ("draft_time", theory.speculative_decoding_speedup, 3.0, -0.1),
    ("hit_rate", theory.ssd_speedup, 1.1, 3.0, 2.0, 0.5, 0.5),
    ("backup_time", theory.ssd_speedup, 0.5, 3.0, 2.0, 0.5, -0.5),
    ("hit_rate_after_backup", theory.overall_hit_rate, 0.5, 1.5),
    ("draft_time", theory.ssd_over_speculative_decoding, 0.5, -1.0),
    ("primary_time", theory.ssd_over_speculative_decoding, 0.5, 1.0, -1.0),
    ("expected_sd", theory.ssd_over_speculative_decoding_bound, 0.5, 3.0, 0.0),
    ("acceptance_rate", theory.geometric_fan_out, 3, 10, 1.0, 0.5),
    ("power_law_exponent", theory.geometric_fan_out, 3, 10, 0.5, 0),
    ("probabilities", theory.fan_out_for, [0.5, -0.5], 10, 0.5),
    ("probabilities", theory.fan_out_for, [0.0, 0.0], 10, 0.5),
    ("budget", theory.fan_out_for, [0.5, 0.5], -1, 0.5),
    ("hit_rate", theory.critical_batch_size, 1.0, 0.5, 3.0, 2.0),
    ("primary_time", theory.critical_batch_size, 0.5, 0.0, 3.0, 2.0),
    ("expected_miss", theory.critical_batch_size, 0.5, 0.5, 2.0, 3.0),
    ("fan_outs", theory.fit_power_law, [0.0, 2.0], [0.5, 0.3]),
    ("miss_rates", theory.fit_power_law, [1.0, 2.0], [0.5, 1.3]),
    ("as long", theory.fit_power_law, [1.0, 2.0, 3.0], [0.5, 0.3]),
    ("two different", theory.fit_power_law, [2.0, 2.0, 4.0], [0.5, 0.3, 0.0]),
]


def test_arguments_out_of_range_are_named():
    for name, formula, *arguments in OUT_OF_RANGE:
        with pytest.raises(ValueError, match=name):
            formula(*arguments)
