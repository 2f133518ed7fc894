"""A planner that measures, and picks what is predicted to give the most tokens per second."""

import dataclasses
import math

from ..config import SSDConfig
from .corrections import Corrections, kind_of
from .ladder import Ladder
from .measurements import Measurements
from .planner import FixedPlanner, Plan, Planner, first_fallback
from .predictions import Predictions
from .rests import Rests

EXPLORED = ((4, 8), (7, 8), (4, 8), (1, 8), (7, 0), (1, 0), (4, 0))
"""
Lookahead and budget of the first rounds of an unknown pair, so that there is a measured time for everything. Plain
decoding comes next, unless it is out of the question.
"""
FIRST_LOOK, LONGEST_BETWEEN_LOOKS = 24, 192  # rounds until it is seen again what it would be like otherwise
ROUNDS_OF_A_LOOK, SHORTEST_LOOK, SECONDS_OF_A_LOOK = 5, 2, 0.05
ROUNDS_AFTER_A_REST, NEARLY = 16, 0.85  # if drafting is predicted to be nearly as good: a few rounds tell too little
WORTH_A_LOOK = 0.85  # share of the best speed that must be predicted for something to look at it
PATIENCE = 8  # rounds for which a new plan waits for a moment in which the draft has nothing to do
LONG_AGO, UNSURE = 384, 1.5  # rounds after which plain decoding may as well be so many times as fast as it was
UNSEEN = 2.5  # the same where it was never measured: a target that never waits computes faster than one that does
UNSETTLED = 2  # rounds after a change that are no measure: a processor that has waited is slower for a while
UNSETTLED_REST, LONGEST_UNSETTLED_REST = 0.1, 16  # seconds, rounds: a core is slower while others have had work
WORTH_A_CHANGE = 1.02  # predicted gain below which a plan stays as it is
WORTH_ANOTHER_FALLBACK = 1.1  # predicted gain below which the fallback stays as it is
ENOUGH_DRAFTED, CLEARLY = 24, 0.9  # rounds of drafting before a rest, unless it is clearly better
NOT_WORSE = 0.97  # share of plain decoding's speed that is enough to go on drafting: who rests learns nothing
USELESS = 0.4  # acceptance rate
ENOUGH_MISSES = 16  # rows that missed, before fallbacks are compared
SAGUARO_LADDER = (1.0, 0.7, 0.4, 0.1)


class AutoPlanner(Planner):
    """
    Picks what is predicted to be fastest, by the cost model of Theorem 7 and Corollary 16 with measured parts: what a
    forward pass of either model costs, which tokens are accepted, which guesses of bonus tokens are right. Besides
    drafting ahead there is drafting in turn (a budget of 0), which wins where the two models get in each other's way,
    and resting (a lookahead of 0), where the draft does not pay at all.

    Args:
        config (`SSDConfig`): Numbers in it stay as they are.
        rows (`int`): Batch size.
        vocab_size (`int`): Of both models.
        sampled (`bool`): Whether tokens are sampled, so that Saguaro sampling makes a difference.
        drafts (`int`, *optional*): How many share the work; each prepares a budget of its own.
    """

    is_repeatable = False

    def __init__(self, config: SSDConfig, rows: int, vocab_size: int, sampled: bool, drafts: int = 1):
        self.config, self.rows, self.drafts = config, rows, drafts
        self.measured = Measurements(config, rows)
        self.rounds, self.replan_at = 0, len(EXPLORED)
        self.predictions = Predictions(config, self.measured, vocab_size, sampled, drafts)
        self.rests, self.looks, self.look_at = Rests(), 0, FIRST_LOOK
        self.looks_until = len(EXPLORED)
        self.fallback = first_fallback(config)
        self.adapts_tokens = self.predictions.adapts_tokens  # otherwise a seed gives the same tokens again
        self.compares_backups = config.fallback == "auto" and self.adapts_tokens and config.asynchronous
        self.corrections = Corrections()
        self.predicted: tuple[float, float] | None = None  # tokens and seconds of a round of the current plan
        self.next: tuple[tuple[int, int], tuple[float, float] | None] | None = None  # the same of one to come
        self.kind, self.unsettled, self.drafted = "", 0, 0
        self.has_rested, self.tried_until = False, 0
        self.saguaro = None
        if config.saguaro_c == "auto":
            self.saguaro = Ladder(SAGUARO_LADDER if sampled and self.adapts_tokens else (1.0,))
        self.current = self._plan_of(*EXPLORED[0])

    def observe(self, round_):
        self.rounds += 1
        now = (self.current.lookahead, self.current.budget)
        kind = kind_of(*now)
        self.unsettled = self.unsettled - 1 if kind == self.kind else self._unsettled(kind)
        self.kind = kind
        self.drafted += kind != "rest"
        if self.rounds > len(EXPLORED):
            plain = self.measured.plain_decoding()
            if round_.lookahead == 0:
                self.rests.rested(plain)
            elif round_.elapsed:
                tokens = self.measured.expected_tokens(round_.lookahead)[-1]
                self.rests.drafted(round_.elapsed, plain * tokens)
        if self.unsettled >= 0 and self.rounds > len(EXPLORED):
            round_ = dataclasses.replace(round_, seconds=0.0, elapsed=0.0)
        live = self.measured.live
        self.measured.observe(round_)
        if self.measured.live != live:
            self._live_rows_changed()
        # How long a rest takes is measured, not predicted; and what few rows take says nothing of how long all take.
        if round_.elapsed and self.predicted is not None and kind != "rest" and live == self.rows:
            # Not what happened to be accepted, but what was to be expected of so many tokens: chance is left out.
            tokens, seconds = self.predicted
            gained = live * self.measured.expected_tokens(round_.lookahead)[-1]
            self.corrections.observe(now, round_.elapsed / gained * tokens / seconds)
        if self.saguaro is not None:
            if self.saguaro.observe(round_):
                self.current = dataclasses.replace(self.current, saguaro_c=self.saguaro.value)

    def begin(self):
        live = self.measured.live
        self.measured.begin()
        if live != self.rows:
            self._live_rows_changed()
            if self.current.lookahead and self.rounds >= len(EXPLORED):
                self.next = self._replan()  # the plan for the last rows of the call before is not one for all rows

    def _live_rows_changed(self) -> None:
        """What was predicted is not for so many rows; except for a rest or a look, that is a reason to plan anew."""
        self.predicted = self.next = None
        if self.current.lookahead and self.rounds >= self.looks_until:
            self.replan_at = min(self.replan_at, self.rounds)

    def observe_choice(self, seconds):
        self.measured.choice.observe(seconds)

    def observe_branches(self, tokens, seconds):
        self.measured.branches.observe(tokens, seconds)

    def observe_step(self, tokens, seconds):
        self.measured.step.observe(tokens, seconds)

    def observe_miss(self, kind, tokens):
        if kind in self.measured.tokens_after_miss:
            self.measured.tokens_after_miss[kind].observe(tokens)

    # ---------------------------------------------------------------- what to do

    def plan(self):
        if self.rounds < len(EXPLORED):
            self.current = self._plan_of(*EXPLORED[self.rounds])
            return self.current
        is_busy = self.current.lookahead and self.current.budget and self.replan_at != self.looks_until
        if self.next is None and self.rounds >= self.replan_at + (PATIENCE if is_busy else 0):
            self.next = self._replan()
        if self.next is not None:
            choice, self.predicted = self.next
            self.current, self.next = self._plan_of(*choice), None
        return self.current

    def think(self):
        # It takes two milliseconds, which are better not spent before the branches grow.
        if self.next is None and self.rounds >= max(self.replan_at, len(EXPLORED)):
            self.next = self._replan()

    @property
    def rest(self):
        # This round's outcome, and the next one's, have yet to be observed.
        return max(0, self.replan_at - self.rounds - 2) if self.current.lookahead == 0 else 0

    def lookahead(self, known):
        most = self.current.lookahead
        if not self.adapts_tokens or self.rounds < self.looks_until:
            return most
        ready = min(known, default=most)
        alone = self.current.budget == 0
        step, tokens = self.measured.drafting(self.measured.live, alone=True), self.measured.expected_tokens(most)
        speeds = [
            tokens[k] / (self.measured.verification(k, alone) + max(0, k - ready) * step) for k in range(most + 1)
        ]
        return max(range(most + 1), key=speeds.__getitem__)

    def _replan(self) -> tuple[tuple[int, int], tuple[float, float] | None]:
        """Returns lookahead and budget for the next rounds, and what is predicted for them."""
        self.replan_at = self.rounds + min(16, max(4, self.rounds // 8))
        predicted = self.predictions.of_all_plans()
        speeds = {plan: tokens / (seconds * self.corrections(plan)) for plan, (tokens, seconds) in predicted.items()}
        resting = speeds.pop((0, 0), 0.0)
        best, now = max(speeds, key=speeds.get), (self.current.lookahead, self.current.budget)
        if not self.has_rested and UNSEEN * resting > speeds[best]:
            return self._look_at_rest(), None
        # The beginning of a text is not like the rest of it.
        is_new = self.drafted < ENOUGH_DRAFTED and self.measured.acceptance(1)[0] > USELESS
        if speeds[best] < (CLEARLY if is_new else NOT_WORSE) * resting:
            choice = self._rest_or_try(best, speeds[best] > NEARLY * resting)
        else:
            choice = self._draft(best, now, speeds, resting)
        return choice, predicted.get(choice)

    def _draft(
        self, best: tuple[int, int], now: tuple[int, int], speeds: dict[tuple[int, int], float], resting: float
    ) -> tuple[int, int]:
        """Takes the best plan, or stays with the one there is, or looks at another one for a while."""
        self.rests.forget()
        if speeds[best] < WORTH_A_CHANGE * speeds.get(now, 0.0):
            best = now
        if self.rounds >= self.look_at:
            best = self._look(best, speeds, resting)
        if self.compares_backups and best[1]:
            self._choose_fallback(best[0])
        return best

    def _look(self, best: tuple[int, int], speeds: dict[tuple[int, int], float], resting: float) -> tuple[int, int]:
        """
        What is not done is not measured either: looks in turn at resting, at the other way of drafting, and at the
        most promising of all plans, for a few rounds, where what is predicted for them is not out of the question. The
        longer ago plain decoding was measured, the less that says: the machine may have been slower just then.
        """
        self.looks += 1
        self.look_at = self.rounds + min(LONGEST_BETWEEN_LOOKS, FIRST_LOOK * 2 ** (self.looks // 3))
        long_ago = self.rounds - self.measured.plain_at > LONG_AGO
        resting *= UNSURE if long_ago else 1.0
        if resting and (self.looks % 3 == 1 or (long_ago and resting > WORTH_A_LOOK * speeds[best])):
            other = {(0, 0): resting}
        elif self.looks % 3 == 2:
            other = {plan: speed for plan, speed in speeds.items() if (plan[1] == 0) != (best[1] == 0)}
        else:
            other = {plan: speed * self.corrections.hope(plan) for plan, speed in speeds.items() if plan != best}
            other = {plan: speed for plan, speed in other.items() if speed > speeds[best]}
        candidate = max(other, key=other.get, default=best)
        if other.get(candidate, 0.0) < WORTH_A_LOOK * speeds[best]:
            return best
        return self._look_at_rest() if candidate == (0, 0) else self._try(candidate)

    def _look_at_rest(self) -> tuple[int, int]:
        """Sees how long plain decoding takes: for a few rounds, or fewer where they are long."""
        self.has_rested = True
        measured = math.ceil(SECONDS_OF_A_LOOK / self.measured.plain_decoding())
        measured = min(max(SHORTEST_LOOK, measured), ROUNDS_OF_A_LOOK)
        self.replan_at = self.looks_until = self.rounds + self._unsettled("rest") + measured + 1
        return 0, 0

    def _unsettled(self, kind: str) -> int:
        """How many rounds are no measure after a change to another kind of plan."""
        if kind != "rest":
            return UNSETTLED
        return min(max(UNSETTLED, math.ceil(UNSETTLED_REST / self.measured.plain_decoding())), LONGEST_UNSETTLED_REST)

    def _rest_or_try(self, best: tuple[int, int], is_close: bool) -> tuple[int, int]:
        """
        Rests ([`Rests`] says how long), and in between sees for a few rounds how it is now, or for some more if it is
        close. If it is long ago that plain decoding was measured, that comes first.
        """
        if self.current.lookahead and is_close and self.rounds < self.tried_until:
            return self._try(best)
        if self.current.lookahead and self.measured.plain_is_old:
            return self._look_at_rest()
        if self.current.lookahead or self.rounds <= self.looks_until:
            self.replan_at = self.rounds + self.rests.next(self.measured.plain_decoding())
            return 0, 0
        self.tried_until = self.rounds + ROUNDS_AFTER_A_REST
        return self._try(best)

    def _try(self, plan: tuple[int, int]) -> tuple[int, int]:
        """Sees for a few rounds what a plan is like."""
        self.replan_at = self.looks_until = self.rounds + ROUNDS_OF_A_LOOK
        return plan

    def _plan_of(self, lookahead: int, budget: int) -> Plan:
        config = self.config
        most = self.predictions.largest_budget(lookahead)
        return Plan(
            lookahead if self.adapts_tokens else config.lookahead,
            config.budget if isinstance(config.budget, int) else min(budget, most),
            self.fallback,
            self.saguaro.value if self.saguaro is not None else config.saguaro_c,
            config.acceptance_rate,
            config.power_law_exponent,
            self.drafts,
        )

    def _choose_fallback(self, lookahead: int) -> None:
        """The kind in use stays unless another one is clearly better (Theorem 17)."""
        if self.measured.tokens_after_miss["ngram"].weight < ENOUGH_MISSES:
            return
        speeds = self.predictions.of_fallbacks(lookahead)
        best = max(speeds, key=speeds.get)
        if speeds[best] > WORTH_ANOTHER_FALLBACK * speeds[self.fallback]:
            self.fallback = best


def planner_for(config: SSDConfig, rows: int, vocab_size: int, sampled: bool, drafts: int = 1) -> Planner:
    """Returns a new planner: a fixed one if the config gives both numbers."""
    if config.lookahead == "auto" or config.budget == "auto":
        return AutoPlanner(config, rows, vocab_size, sampled, drafts)
    return FixedPlanner(config, drafts)
