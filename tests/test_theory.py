import itertools
import math

import pytest

from hf_ssd import theory


def test_expected_tokens_by_hand():
    assert theory.expected_tokens(0.0, 7) == 1
    assert theory.expected_tokens(1.0, 7) == 8
    assert theory.expected_tokens(0.5, 2) == pytest.approx(1.75)  # 1 + 1/2 + 1/4


def test_speedups_by_hand():
    assert theory.speculative_decoding_speedup(4.0, 0.6) == pytest.approx(2.5)
    assert theory.ssd_speedup(1.0, 4.0, 1.0, primary_time=0.5, backup_time=9.0) == pytest.approx(4.0)
    assert theory.ssd_speedup(1.0, 4.0, 1.0, primary_time=2.0, backup_time=9.0) == pytest.approx(2.0)
    assert theory.ssd_speedup(0.0, 4.0, 3.0, primary_time=0.5, backup_time=0.5) == pytest.approx(2.0)
    # Two rows: both hit with chance 1/4, otherwise the round takes 1.5; 2 tokens on average.
    assert theory.ssd_speedup(0.5, 3.0, 1.0, 0.5, 0.5, rows=2) == pytest.approx(2.0 / (0.25 * 1 + 0.75 * 1.5))
    assert theory.ssd_over_speculative_decoding_bound(0.5, 4.0, 4.0) == pytest.approx(1.5)


def test_ranges():
    with pytest.raises(ValueError, match="acceptance_rate"):
        theory.expected_tokens(1.1, 3)
    with pytest.raises(ValueError, match="power_law_exponent"):
        theory.geometric_fan_out(3, 10, 0.5, 0)


@pytest.mark.parametrize("a, r", [(0.8, 0.5), (0.5, 1.0), (0.9, 0.3)])
def test_geometric_fan_out_is_theorem_12_and_the_best_allocation(a, r):
    lookahead, budget = 2, 12
    shares = theory.geometric_fan_out(lookahead, budget, a, r)
    assert sum(shares) == pytest.approx(budget)
    assert shares[1] / shares[0] == pytest.approx(a ** (1 / (1 + r)))
    assert shares[2] / shares[0] == pytest.approx(a ** (2 / (1 + r)) * (1 - a) ** (-1 / (1 + r)))

    def hit_rate(fan_outs):
        chance = [(1 - a) * a**k for k in range(lookahead)] + [a**lookahead]
        return sum(p * (1 - f**-r) for p, f in zip(chance, fan_outs))

    grid = [i / 4 for i in range(1, 4 * budget)]
    best = max(hit_rate((x, y, budget - x - y)) for x, y in itertools.product(grid, grid) if budget - x - y > 0)
    assert hit_rate(shares) >= best - 1e-9
    uniform_is_worse = hit_rate([budget / 3] * 3) < hit_rate(shares)
    assert uniform_is_worse and math.isfinite(best)
