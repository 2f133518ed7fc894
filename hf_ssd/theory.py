"""
The paper's formulas as pure functions of plain numbers (Kumar, Dao, May, ICLR 2026). Every time T is in units of a
verification by the target, and every expectation E in tokens per round, the bonus token included. Arguments out of
range raise `ValueError`.

The symbols: `acceptance_rate` a, the chance that a drafted token is accepted, independent of the others; `lookahead`
K, the drafted tokens of a speculation; `budget` B, the outcomes prepared; `power_law_exponent` r, where a fan-out of
F misses the bonus token with probability F^-r; `hit_rate` p, the chance that a row's outcome was prepared;
`expected_hit` E_hit and `expected_miss` E_miss, the tokens of a round whose speculation came from the cache and from
the fallback; `primary_time` T_p, to prepare the cache, hidden up to 1; `backup_time` T_b, of the fallback after a miss;
`draft_time` T_SD and `expected_sd` E_SD, of synchronous speculative decoding (SD); `rows` b, the batch size.
"""

import math
from collections.abc import Iterable
from itertools import accumulate
from operator import mul


def acceptance_rate(p: list[float], q: list[float]) -> float:
    """How often a drafted token is accepted: sum_x min(p(x), q(x)) of the target's p and the draft's q (Theorem 1)."""
    _check(0, 1, p=p, q=q)
    for name, total in (("p", math.fsum(p)), ("q", math.fsum(q))):
        if abs(total - 1) > 1e-4:  # a float32 softmax over a large vocabulary sums to 1 only roughly
            raise ValueError(f"`{name}` sums to {total}, but must sum to 1.")
    if len(p) != len(q):
        raise ValueError(f"`p` has {len(p)} tokens and `q` has {len(q)}, but both must list the same ones.")
    return min(1.0, math.fsum(map(min, p, q)))


def expected_tokens(acceptance_rate: float, lookahead: int) -> float:
    """Expected tokens of a round with K drafted tokens: E = (1 - a^(K+1)) / (1 - a)."""
    _check(0, 1, acceptance_rate=acceptance_rate)
    _check(0, math.inf, lookahead=lookahead)
    if acceptance_rate == 1:
        return float(lookahead + 1)
    return (1 - acceptance_rate ** (lookahead + 1)) / (1 - acceptance_rate)


def expected_tokens_by_lookahead(acceptance_rates: list[float]) -> list[float]:
    """Expected tokens of a round with 0 to K drafted tokens with rates of their own: E = 1 + a_1 + a_1 a_2 + ..."""
    _check(0, 1, acceptance_rates=acceptance_rates)
    return list(accumulate(accumulate(acceptance_rates, mul), initial=1.0))


def expected_tokens_of_slowest_row(tokens_by_lookahead: list[float], rows: int, rounds: int) -> float:
    """
    Expected tokens of a round of the slowest of b rows in n rounds, from the expected tokens E_0 ... E_K of any row
    with 0 to K drafted tokens: E_K - s sqrt(2 log(b) / n), at least 1, with s the standard deviation of its tokens.
    """
    mean, before = tokens_by_lookahead[-1], [0.0, *tokens_by_lookahead]
    square = math.fsum((2 * k + 1) * (one - last) for k, (last, one) in enumerate(zip(before, tokens_by_lookahead)))
    deviation = math.sqrt(max(0.0, square - mean**2))
    return max(1.0, mean - deviation * math.sqrt(2 * math.log(rows) / rounds))


def expected_tokens_of_tree(acceptance_rates: list[float], caught: list[float]) -> float:
    """
    Expected tokens of a round that verifies siblings beside K drafted tokens, if the k-th is accepted with the k-th
    rate where all before it were, and after its rejection the target's token is among its siblings with chance
    `caught[k]`: the tokens of the chain, and sum_k a_1 ... a_(k-1) (1 - a_k) caught_k.
    """
    _check(0, 1, acceptance_rates=acceptance_rates, caught=caught)
    reached = [1.0, *accumulate(acceptance_rates, mul)]
    gained = (chance * (1 - a) * c for chance, a, c in zip(reached[:-1], acceptance_rates, caught, strict=True))
    return math.fsum(reached) + math.fsum(gained)


def outcome_probabilities(acceptance_rate: float, lookahead: int) -> list[float]:
    """How likely each accepted count is: P(k) = a^k (1 - a) for k < K and P(K) = a^K."""
    _check(0, 1, acceptance_rate=acceptance_rate)
    _check(0, math.inf, lookahead=lookahead)
    return [acceptance_rate**k * (1 - acceptance_rate) for k in range(lookahead)] + [acceptance_rate**lookahead]


def speculative_decoding_speedup(expected_tokens: float, draft_time: float) -> float:
    """Speed of synchronous speculative decoding over plain decoding: E_SD / (1 + T_SD)."""
    _check(0, math.inf, draft_time=draft_time)
    return expected_tokens / (1 + draft_time)


def ssd_speedup(
    hit_rate: float, expected_hit: float, expected_miss: float, primary_time: float, backup_time: float, rows: float = 1
) -> float:
    """
    Speed of SSD over plain decoding (Theorem 7; Corollary 16 for a batch of b rows, which may be a mean): all rows wait
    if any row misses, so it is (p E_hit + (1-p) E_miss) / (p^b max(1, T_p) + (1 - p^b)(1 + T_b)).
    """
    _check(0, 1, hit_rate=hit_rate)
    _check(0, math.inf, primary_time=primary_time, backup_time=backup_time)
    all_hit = hit_rate**rows
    tokens = hit_rate * expected_hit + (1 - hit_rate) * expected_miss
    return tokens / (all_hit * max(1.0, primary_time) + (1 - all_hit) * (1 + backup_time))


def overall_hit_rate(hit_rate_after_primary: float, hit_rate_after_backup: float) -> float:
    """
    Share of rounds that hit in the long run: p = p_b / (1 - p_p + p_b) (Equation 1), where p_p is the chance of a hit
    after a hit, and p_b after a miss. With p_p = 1 it is 1, which holds if the first round hits.
    """
    _check(0, 1, hit_rate_after_primary=hit_rate_after_primary, hit_rate_after_backup=hit_rate_after_backup)
    if hit_rate_after_primary == 1:
        return 1.0
    return hit_rate_after_backup / (1 - hit_rate_after_primary + hit_rate_after_backup)


def ssd_over_speculative_decoding(hit_rate: float, draft_time: float, primary_time: float = 1.0) -> float:
    """
    Speed of SSD over synchronous speculative decoding if the same draft serves as SD's draft, primary and backup, so
    E_hit = E_miss = E_SD and T_b = T_SD: (1 + T_SD) / (p max(1, T_p) + (1-p)(1 + T_SD)) (Corollary 8). It is never
    below 1 if T_p <= 1 + T_SD.
    """
    _check(0, math.inf, draft_time=draft_time)
    return ssd_speedup(hit_rate, 1.0, 1.0, primary_time, draft_time) / speculative_decoding_speedup(1.0, draft_time)


def ssd_over_speculative_decoding_bound(draft_time: float, expected_hit: float, expected_sd: float) -> float:
    """Upper bound on the speed of SSD over synchronous speculative decoding: (1 + T_SD) E_hit / E_SD (Corollary 9)."""
    _check(0, math.inf, draft_time=draft_time)
    _check(0, math.inf, exclusive=True, expected_sd=expected_sd)
    return (1 + draft_time) * expected_hit / expected_sd


def geometric_fan_out(lookahead: int, budget: float, acceptance_rate: float, power_law_exponent: float) -> list[float]:
    """
    The fan-out F_0 ... F_K of sum B that maximizes the hit rate, before rounding (Theorem 12): F_k = F_0 a^(k/(1+r))
    for k < K and F_K = F_0 a^(K/(1+r)) (1-a)^(-1/(1+r)).
    """
    _check(0, 1, exclusive=True, acceptance_rate=acceptance_rate)
    return fan_out_for(outcome_probabilities(acceptance_rate, lookahead), budget, power_law_exponent)


def fan_out_for(probabilities: list[float], budget: float, power_law_exponent: float) -> list[float]:
    """
    The fan-out F_0 ... F_K for any outcome probabilities P(k), of which only the ratios matter, for example after a
    backup's speculation (Theorem 18): sum_k P(k) (1 - F_k^-r) is largest if F_k is in proportion to P(k)^(1/(1+r)). An
    F_k may be below 1, where the power law has no meaning.
    """
    _check(0, math.inf, probabilities=probabilities, budget=budget)
    _check(0, math.inf, exclusive=True, sum_of_probabilities=sum(probabilities), power_law_exponent=power_law_exponent)
    weights = [probability ** (1 / (1 + power_law_exponent)) for probability in probabilities]
    total = math.fsum(weights)
    return [budget * weight / total for weight in weights]


def critical_batch_size(hit_rate: float, primary_time: float, expected_hit: float, expected_miss: float) -> float:
    """
    Batch size above which an instant backup (T_b = 0, E_miss after a miss) beats the primary used just in time
    (T_b = T_p, E_hit after a miss too): b* = log(1 + 1/T_p - E_hit / (T_p (p E_hit + (1-p) E_miss))) / log p
    (Theorem 17). It is infinite where the logarithm has no value, because the backup never wins there. A hit counts as
    a single unit of time, so the curves of `ssd_speedup` cross at b* only if T_p <= 1.
    """
    _check(0, 1, exclusive=True, hit_rate=hit_rate)
    _check(0, math.inf, exclusive=True, primary_time=primary_time)
    _check(1, expected_hit, expected_miss=expected_miss)
    # The logarithm is of 1 - loss. This form gives exactly 0 if E_hit = E_miss, where 1 + 1/T_p - 1/T_p would round.
    backup_tokens = hit_rate * expected_hit + (1 - hit_rate) * expected_miss
    loss = (1 - hit_rate) * (expected_hit - expected_miss) / (primary_time * backup_tokens)
    return math.log1p(-loss) / math.log(hit_rate) if loss < 1 else math.inf


def fit_power_law(fan_outs: list[float], miss_rates: list[float]) -> tuple[float, float]:
    """Fits miss rate = scale * F^-r, by least squares in logarithms without rates of 0. Returns the scale and r."""
    _check(0, math.inf, exclusive=True, fan_outs=fan_outs)
    _check(0, 1, miss_rates=miss_rates)
    points = [(math.log(fan_out), math.log(miss)) for fan_out, miss in zip(fan_outs, miss_rates) if miss > 0]
    if len(fan_outs) != len(miss_rates) or len({x for x, _ in points}) < 2:
        raise ValueError("`fan_outs` and `miss_rates` must be as long, with misses at two different fan-outs at least.")
    x_mean, y_mean = (math.fsum(values) / len(points) for values in zip(*points))
    slope = math.fsum((x - x_mean) * (y - y_mean) for x, y in points) / math.fsum((x - x_mean) ** 2 for x, _ in points)
    return math.exp(y_mean - slope * x_mean), -slope


def predict(stats) -> float:
    """
    Predicts the decoding speed of a call, in tokens per second of all rows together, by Corollary 16 (Theorem 7 for a
    single row) from the parts that the call measured ([`SSDStats`]). The hit rate p, E_hit and E_miss are means over
    unfinished rows, b is the mean number of unfinished rows, and V the mean time of a verification. The mean wait gives
    1 + wait / V for max(1, T_p) in rounds where all rows hit, and wait / V for T_b in other rounds. If a kind of row or
    round does not occur, the mean of the other kind is used. A row with early tokens waited no more than a hit.
    """
    rows, waits, verifications = [], [], []
    for record in stats.records:
        unfinished = [(record.accepted[row] + 1, record.hits[row] or record.is_early(row)) for row in record.live]
        if unfinished:
            rows += unfinished
            waits.append((record.wait_seconds, all(hit for _, hit in unfinished)))
            verifications.append(record.verify_seconds)
    if not sum(verifications) > 0:
        raise ValueError("`stats` holds no verified round, so there is nothing to predict from.")

    def mean(pairs, hit):
        values = [value for value, was_hit in pairs if was_hit == hit] or [value for value, _ in pairs]
        return math.fsum(values) / len(values)

    verify, mean_rows = math.fsum(verifications) / len(verifications), len(rows) / len(verifications)
    hit_rate, primary_time = sum(hit for _, hit in rows) / len(rows), 1 + mean(waits, True) / verify
    expected_hit = mean(rows, True)
    expected_miss = mean(rows, False)
    backup_time = mean(waits, False) / verify
    speedup = ssd_speedup(hit_rate, expected_hit, expected_miss, primary_time, backup_time, mean_rows)
    return speedup * mean_rows / verify


def _check(low: float, high: float, exclusive: bool = False, **arguments) -> None:
    for name, value in arguments.items():
        for number in value if isinstance(value, Iterable) else [value]:
            if not (low < number < high if exclusive else low <= number <= high):
                ends = ", both excluded" if exclusive else ""
                raise ValueError(f"`{name}` is {value}, but must be between {low} and {high}{ends}.")
