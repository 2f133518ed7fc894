"""A planner that measures, and picks what is predicted to give the most tokens per second."""

import time

from .. import theory
from ..config import SSDConfig
from .costs import Average, LinearCost
from .planner import GUESSES, FixedPlanner, Plan, Planner, first_fallback

LONGEST_LOOKAHEAD = 16
BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
EXPLORED_LOOKAHEADS = (4, 1, 7, 2)  # of the first rounds of an unknown pair, so that slopes are known
ROUNDS_BETWEEN_PLANS = 8
WORTH_A_CHANGE = 1.03  # predicted gain below which a plan stays as it is
FIRST_REST, LONGEST_REST = 32, 512  # rounds of plain decoding before the draft is tried again
SAGUARO_LADDER = (1.0, 0.7, 0.4, 0.1)
ROUNDS_PER_TRIAL = 24


class AutoPlanner(Planner):
    """
    Picks what is predicted to be fastest, by the cost model of Theorem 7 and Corollary 16 with measured parts: what a
    forward pass of either model costs, which tokens are accepted, which guesses of bonus tokens are right.

    Args:
        config (`SSDConfig`): Numbers in it stay as they are.
        rows (`int`): Batch size.
        vocab_size (`int`): Of both models.
        sampled (`bool`): Whether tokens are sampled, so that Saguaro sampling makes a difference.
    """

    def __init__(self, config: SSDConfig, rows: int, vocab_size: int, sampled: bool):
        self.config, self.rows, self.vocab_size = config, rows, vocab_size
        self.draft_cost = LinearCost(relative_slope=0.02)
        self.verification_cost = LinearCost(relative_slope=0.03)
        a = config.acceptance_rate
        self.acceptance = [Average(a, 4.0 if i == 0 else 1.0) for i in range(LONGEST_LOOKAHEAD)]
        self.backup_acceptance = Average(0.2, 10.0)
        # Chance that the guess of each rank is right, after a rejection and at the end: the power law's differences.
        law = [(rank + 1) ** -config.power_law_exponent for rank in range(GUESSES + 1)]
        self.right = {
            rejected: [Average(law[rank] - law[rank + 1], 4.0) for rank in range(GUESSES)] for rejected in (True, False)
        }
        self.misses_over_predicted = Average(1.0, 10.0)
        self.hit_rate = Average(0.5, 1.0)
        self.rounds = self.replan_at = 0
        self.resting_until, self.rest = 0, FIRST_REST
        self.fallback = first_fallback(config)
        self.is_repeatable = False
        self.adapts_tokens = config.lookahead == "auto"  # otherwise a seed gives the same tokens again
        self.compares_backups = config.fallback == "auto" and self.adapts_tokens and config.asynchronous
        self.saguaro = None
        if config.saguaro_c == "auto":
            self.saguaro = _Ladder(SAGUARO_LADDER if sampled and self.adapts_tokens else (1.0,))
        self.current = self._plan_of(EXPLORED_LOOKAHEADS[0], 8)

    # ---------------------------------------------------------------- what happened

    def observe(self, round_):
        self.rounds += 1
        live = [row for row, k in enumerate(round_.accepted) if k >= 0]
        if round_.seconds and self.rounds > 2:  # the first rounds of a process are slow for reasons of their own
            self.verification_cost.observe(round_.lookahead, round_.seconds)
        for row in live:
            k = round_.accepted[row]
            if round_.from_backup and round_.from_backup[row]:
                continue
            for i in range(min(k + 1, round_.lookahead, LONGEST_LOOKAHEAD)):
                self.acceptance[i].observe(i < k)
            if row < len(round_.ranks):
                for rank, guess in enumerate(self.right[k < round_.lookahead]):
                    guess.observe(rank == round_.ranks[row])
        if round_.prepared and live and self.current.lookahead:
            hits = sum(round_.hits[row] for row in live) / len(live)
            self.hit_rate.observe(hits)
            predicted = self._hit_rates(round_.lookahead)[min(self.current.budget, GUESSES) - 1]
            self.misses_over_predicted.observe(min(3.0, (1 - hits) / max(0.02, 1 - predicted)))
        if self.saguaro is not None:
            self.saguaro.observe(sum(round_.accepted[row] + 1 for row in live))

    def observe_forward(self, tokens, seconds):
        self.draft_cost.observe(tokens, seconds)

    def observe_backup(self, matched, tested):
        for i in range(tested):
            self.backup_acceptance.observe(i < matched)

    # ---------------------------------------------------------------- what to do

    def plan(self):
        if self.rounds < self.resting_until:
            return self.current
        if self.rounds < len(EXPLORED_LOOKAHEADS):
            self.current = self._plan_of(EXPLORED_LOOKAHEADS[self.rounds], 8)
        elif self.rounds >= self.replan_at:
            self.replan_at = self.rounds + ROUNDS_BETWEEN_PLANS
            self._replan()
        return self.current

    def lookahead(self, known):
        most = self.current.lookahead
        if not self.adapts_tokens or not self._is_informed:
            return most
        ready = min(known, default=most)
        step = self.draft_cost(self.rows)
        tokens = self._expected_tokens(most)
        speeds = [tokens[k] / (self.verification_cost(k) + max(0, k - ready) * step) for k in range(most + 1)]
        return max(range(most + 1), key=speeds.__getitem__)

    @property
    def _is_informed(self) -> bool:
        return self.verification_cost.observations > 1 and self.draft_cost.observations > 1

    def _replan(self) -> None:
        if not self._is_informed:
            return
        speeds = {}
        for lookahead in self._lookaheads():
            for budget, speed in self._speeds(lookahead).items():
                speeds[lookahead, budget] = speed
        best = max(speeds, key=speeds.get)
        plain = self.rows / self.verification_cost(0)
        if self.adapts_tokens and speeds[best] < plain:
            self.current = self._plan_of(0, 1)
            self.resting_until = self.rounds + self.rest
            self.replan_at = self.resting_until + len(EXPLORED_LOOKAHEADS)
            self.rest = min(2 * self.rest, LONGEST_REST)
            return
        if self.current.lookahead == 0:  # the rest is over: see how it is now
            self.current = self._plan_of(*best)
            return
        self.rest = FIRST_REST
        now = (self.current.lookahead, self.current.budget)
        if speeds[best] < WORTH_A_CHANGE * speeds.get(now, 0.0):
            best = now
        if self.compares_backups:
            self._choose_fallback(*best)
        self.current = self._plan_of(*best)

    def _plan_of(self, lookahead: int, budget: int) -> Plan:
        config = self.config
        return Plan(
            lookahead if self.adapts_tokens else config.lookahead,
            config.budget if isinstance(config.budget, int) else budget,
            self.fallback,
            self.saguaro.value if self.saguaro is not None else config.saguaro_c,
            config.acceptance_rate,
            config.power_law_exponent,
        )

    # ---------------------------------------------------------------- predictions

    def _lookaheads(self):
        return range(1, LONGEST_LOOKAHEAD + 1) if self.adapts_tokens else [self.config.lookahead]

    def _acceptance(self, lookahead: int) -> list[float]:
        """Chance of acceptance by position. A position that was hardly tested looks like the one before it."""
        rates, before = [], self.config.acceptance_rate
        for average in self.acceptance[:lookahead]:
            share = average.weight / (average.weight + 4)
            before = share * average.value + (1 - share) * before
            rates.append(before)
        return rates + [before] * (lookahead - len(rates))

    def _expected_tokens(self, lookahead: int) -> list[float]:
        """Expected tokens of a round with 0 to `lookahead` drafted tokens."""
        tokens, reached = [1.0], 1.0
        for rate in self._acceptance(lookahead):
            reached *= rate
            tokens.append(tokens[-1] + reached)
        return tokens

    def _hit_rates(self, lookahead: int) -> list[float]:
        """Hit rate if the best 1, 2, ... outcomes of a speculation are prepared, as far as averages tell."""
        reached, chances = 1.0, []
        for rate in self._acceptance(lookahead):
            chances += [reached * (1 - rate) * guess.value for guess in self.right[True]]
            reached *= rate
        chances += [reached * guess.value for guess in self.right[False]]
        chances.sort(reverse=True)
        total, rates = 0.0, []
        for chance in chances[: max(BUDGETS)]:
            total += chance
            rates.append(min(1.0, total))
        return rates + rates[-1:] * (max(BUDGETS) - len(rates))

    def _speeds(self, lookahead: int) -> dict[int, float]:
        """Predicted tokens per second of the batch for each budget, misses being drafted just in time."""
        tokens = self._expected_tokens(lookahead)
        verification, step = self.verification_cost, self.draft_cost(self.rows)
        in_time = {k: tokens[k] / (verification(k) + k * step) for k in range(lookahead + 1)}
        after_miss = max(in_time, key=in_time.get) if self.adapts_tokens else lookahead
        if not self.config.asynchronous:
            return {1: self.rows * in_time[lookahead]}
        fixed = self.config.budget
        speeds, hit_rates = {}, self._hit_rates(lookahead)
        for budget in [fixed] if isinstance(fixed, int) else BUDGETS:
            hit_rate = 1 - (1 - hit_rates[min(budget, len(hit_rates)) - 1]) * self.misses_over_predicted.value
            all_hit = min(1.0, max(0.0, hit_rate)) ** self.rows
            # While the target verifies, the trunk is extended and the branches grow; what is left is done for one
            # branch.
            window = verification(lookahead) - self.draft_cost(self.rows * (lookahead + 1))
            grown = min(lookahead, int(window / max(1e-9, self.draft_cost(self.rows * budget))))
            if grown < 1:
                all_hit, grown = 0.0, 0
            # A step that is under way when the outcome comes is finished first: half a step, unless all were done.
            late = 0.5 * self.draft_cost(self.rows * budget) * (grown < lookahead)
            on_hit = verification(lookahead) + late + (lookahead - grown) * step
            on_miss = verification(after_miss) + late + after_miss * step
            gain = all_hit * tokens[lookahead] + (1 - all_hit) * tokens[after_miss]
            speeds[budget] = self.rows * gain / (all_hit * on_hit + (1 - all_hit) * on_miss)
        return speeds

    def _choose_fallback(self, lookahead: int, budget: int) -> None:
        """Corollary 16 for each kind. The kind in use stays unless another one is clearly better (Theorem 17)."""
        one = self.verification_cost(lookahead)
        tokens = self._expected_tokens(lookahead)
        primary_time = lookahead * self.draft_cost(self.rows) / one
        backup = self.backup_acceptance.value
        after_miss = {
            "primary": (tokens[lookahead], primary_time),
            "ngram": (theory.expected_tokens(backup, lookahead), 0.0),
            "random": (1 + 1 / self.vocab_size, 0.0),
        }
        after_backup = sum(guess.value for guess in self.right[True][:budget])  # nearly all of the budget is at k = 0
        speeds = {}
        for kind, (expected, backup_time) in after_miss.items():
            hit_rate = self.hit_rate.value
            if kind != "primary":
                hit_rate = theory.overall_hit_rate(min(hit_rate, 0.999), min(after_backup, 0.999))
            speeds[kind] = theory.ssd_speedup(hit_rate, tokens[lookahead], expected, 0.0, backup_time, self.rows)
        best = max(speeds, key=speeds.get)
        if speeds[best] > WORTH_A_CHANGE * speeds[self.fallback]:
            self.fallback = best


class _Ladder:
    """Tries values in turn and stays with the one that gave the most tokens per second."""

    def __init__(self, values: tuple[float, ...]):
        self.speeds = {value: Average(0.0, 0.0, memory=0.7) for value in values}
        self.value, self.rounds, self.tokens, self.started = values[0], 0, 0, time.perf_counter()

    def observe(self, tokens: int) -> None:
        self.rounds, self.tokens = self.rounds + 1, self.tokens + tokens
        if self.rounds % ROUNDS_PER_TRIAL:
            return
        now = time.perf_counter()
        self.speeds[self.value].observe(self.tokens / (now - self.started))
        self.tokens, self.started = 0, now
        unknown = [value for value, speed in self.speeds.items() if not speed.weight]
        best = max((v for v in self.speeds if v not in unknown), key=lambda v: self.speeds[v].value)
        trial = self.rounds // ROUNDS_PER_TRIAL
        if unknown:
            self.value = unknown[0]
        elif trial % 8 == 0:  # look again at a neighbour, now and then
            values = list(self.speeds)
            place = values.index(best) + (1 if trial % 16 else -1)
            self.value = values[place % len(values)]
        else:
            self.value = best


def planner_for(config: SSDConfig, rows: int, vocab_size: int, sampled: bool) -> Planner:
    """Returns a new planner: a fixed one if the config gives both numbers."""
    if config.lookahead == "auto" or config.budget == "auto":
        return AutoPlanner(config, rows, vocab_size, sampled)
    return FixedPlanner(config)
