"""The paper's formulas as pure functions of plain numbers (Kumar, Dao, May, ICLR 2026)."""

import math


def expected_tokens(acceptance_rate: float, lookahead: int) -> float:
    """
    Expected tokens of one verification round: E = (1 - a^(K+1)) / (1 - a).

    Args:
        acceptance_rate (`float`): Chance a in [0, 1] that one drafted token is accepted, independent of the others.
        lookahead (`int`): Drafted tokens K >= 0 in the speculation.

    Returns:
        `float`: Tokens per round, bonus token included, between 1 and K + 1.
    """
    _check_range("acceptance_rate", acceptance_rate, 0, 1)
    if acceptance_rate == 1:
        return float(lookahead + 1)
    return (1 - acceptance_rate ** (lookahead + 1)) / (1 - acceptance_rate)


def speculative_decoding_speedup(expected_tokens: float, draft_time: float) -> float:
    """
    Speed of synchronous speculative decoding over plain decoding: E_SD / (1 + T_SD).

    Args:
        expected_tokens (`float`): E_SD, tokens per round.
        draft_time (`float`): T_SD, time to draft one speculation in units of one verification.
    """
    return expected_tokens / (1 + draft_time)


def ssd_speedup(
    hit_rate: float, expected_hit: float, expected_miss: float, primary_time: float, backup_time: float, rows: int = 1
) -> float:
    """
    Speed of SSD over plain decoding (Theorem 7; Corollary 16 for a batch).

    Args:
        hit_rate (`float`): p in [0, 1], the chance that a row's outcome was prepared.
        expected_hit (`float`): E_hit, tokens of a round whose speculation came from the cache.
        expected_miss (`float`): E_miss, tokens of a round whose speculation came from the fallback.
        primary_time (`float`): T_p, time to prepare the cache in units of one verification. Hidden up to 1.
        backup_time (`float`): T_b, time of the fallback after a miss in the same units.
        rows (`int`): Batch size b: all rows wait if one of them misses.
    """
    _check_range("hit_rate", hit_rate, 0, 1)
    all_hit = hit_rate**rows
    tokens = hit_rate * expected_hit + (1 - hit_rate) * expected_miss
    return tokens / (all_hit * max(1.0, primary_time) + (1 - all_hit) * (1 + backup_time))


def ssd_over_speculative_decoding_bound(draft_time: float, expected_hit: float, expected_sd: float) -> float:
    """
    Upper bound on the speed of SSD over synchronous speculative decoding: (1 + T_SD) E_hit / E_SD (Corollary 9).
    """
    return (1 + draft_time) * expected_hit / expected_sd


def geometric_fan_out(lookahead: int, budget: float, acceptance_rate: float, power_law_exponent: float) -> list[float]:
    """
    The fan-out that maximizes the hit rate, before rounding (Theorem 12).

    The accepted count is k with probability a^k (1 - a) for k < K and a^K for k = K, and a fan-out of F misses the
    bonus token with probability F^-r. Then F_k = F_0 a^(k/(1+r)) for k < K and
    F_K = F_0 a^(K/(1+r)) (1-a)^(-1/(1+r)), with F_0 such that they sum to the budget.

    Args:
        lookahead (`int`): K >= 0.
        budget (`float`): Outcomes to prepare, the sum of the result.
        acceptance_rate (`float`): a, between 0 and 1, both excluded.
        power_law_exponent (`float`): r > 0.

    Returns:
        `list[float]` of length `lookahead + 1`: Outcomes to prepare for each accepted count.
    """
    if not 0 < acceptance_rate < 1:
        raise ValueError(f"`acceptance_rate` is {acceptance_rate}, but must be between 0 and 1, both excluded.")
    if power_law_exponent <= 0:
        raise ValueError(f"`power_law_exponent` is {power_law_exponent}, but must be positive.")
    exponent = 1 / (1 + power_law_exponent)
    weights = [acceptance_rate ** (k * exponent) for k in range(lookahead + 1)]
    weights[-1] *= (1 - acceptance_rate) ** -exponent
    total = math.fsum(weights)
    return [budget * weight / total for weight in weights]


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"`{name}` is {value}, but must be between {low} and {high}.")
