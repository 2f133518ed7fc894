"""A planner that measures, and picks what is predicted to give the most tokens per second."""

import dataclasses
import math
import statistics

from ..config import SSDConfig
from .corrections import Corrections, kind_of
from .ladder import Ladder
from .measurements import USUAL, Measurements
from .planner import PREPARED, FixedPlanner, Plan, Planner, first_fallback
from .predictions import Predictions
from .rests import Rests
from .row_lengths import RowLengths

EXPLORED = ((4, 8), (7, 8), (4, 8), (1, 8), (7, 0), (1, 0), (4, 0))
"""
Lookahead and budget of the first rounds of an unknown pair, so that there is a measured time for everything. Plain
decoding comes next, unless it is out of the question.
"""
FIRST_LOOK, LONGEST_BETWEEN_LOOKS = 24, 192  # rounds until it is seen again what it would be like otherwise
ROUNDS_OF_A_LOOK, SHORTEST_LOOK, SECONDS_OF_A_LOOK = 5, 2, 0.05
ROUNDS_AFTER_A_REST, NEARLY = 16, 0.92  # if drafting is predicted to be nearly as good: a few rounds tell too little
WORTH_A_LOOK = 0.7  # share of the best speed that must be predicted for something to look at it
PATIENCE = 8  # rounds for which a new plan waits for a moment in which the draft has nothing to do
UNSEEN = 2.5  # how many times as fast as it looks plain decoding may be, until seen: a target that waits is slower
UNSETTLED = 2  # rounds after a change that are no measure: a processor that has waited is slower for a while
UNSETTLED_REST, LONGEST_UNSETTLED_REST = 0.1, 16  # seconds, rounds: a core is slower while others have had work
WORTH_A_CHANGE = 1.02  # predicted gain below which a plan stays as it is
WORTH_ANOTHER_FALLBACK = 1.1  # predicted gain below which the fallback stays as it is
SLOW_AT_FIRST = 48  # rounds, of a process or of a setting: they correct no prediction
ENOUGH_DRAFTED, CLEARLY = 16, 0.75  # rounds of drafting ahead before it may be given up, unless it is clearly worse
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
        self.corrections, self.row_lengths = Corrections(), RowLengths(rows)
        # Rounds of the plan: lookahead, seconds, whether every row's speculation had been prepared, paces.
        self.spent: list[tuple[int, float, bool, float, float]] = []
        self.next: tuple[int, int] | None = None  # lookahead and budget to come
        self.kind, self.unsettled, self.drafted = "", 0, 0
        self.has_rested, self.tried_until, self.tries = False, 0, 0
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
        self.drafted += kind == "ahead"
        self.row_lengths.observe(round_)
        if self.rounds == len(EXPLORED):
            self.measured.fade()
        if self.rounds > len(EXPLORED):
            plain = self.measured.plain_decoding()
            if round_.lookahead == 0:
                self.rests.rested(plain)
            elif round_.elapsed:
                tokens = self.measured.expected_tokens(round_.lookahead)[-1] - self.row_lengths.fallen_behind
                self.rests.drafted(self.measured.at_usual_pace(round_.elapsed), plain * tokens)
        if self.unsettled >= 0 and self.rounds > len(EXPLORED):
            round_ = dataclasses.replace(round_, seconds=0.0, elapsed=0.0)
        live = self.measured.live
        self.measured.observe(round_)
        if self.measured.live != live:
            self._live_rows_changed()
        # How long a rest takes is measured, not predicted; and what few rows take says nothing of how long all take.
        if round_.elapsed and kind != "rest" and live == self.rows and self.rounds > SLOW_AT_FIRST:
            paces = self.measured.target_pace.factor, self.measured.draft_pace.factor
            was_ready = all(source == PREPARED for source in round_.sources)
            self.spent.append((round_.lookahead, round_.elapsed, was_ready, *paces))
        if self.saguaro is not None:
            if self.saguaro.observe(round_):
                self.current = dataclasses.replace(self.current, saguaro_c=self.saguaro.value)

    @property
    def patience(self):
        # Where the draft has nothing to do while it drafts in turn or rests, it can as well learn; and what is looked
        # at, or is new, is to be known soon.
        is_busy = self.current.lookahead and self.current.budget and self.rounds >= SLOW_AT_FIRST
        if not is_busy or self.next is not None or self.saguaro is not None:
            return 0
        return self.replan_at + self._delay - self.rounds

    @property
    def _delay(self) -> int:
        """For how many rounds a new plan may wait."""
        is_busy = self.current.lookahead and self.current.budget and self.replan_at != self.looks_until
        return PATIENCE if is_busy else 0

    def begin(self):
        live = self.measured.live
        self.measured.begin()
        self.row_lengths.begin()
        if live != self.rows:
            self._live_rows_changed()
            if self.current.lookahead and self.rounds >= len(EXPLORED):
                self.next = self._replan()  # the plan for the last rows of the call before is not one for all rows

    def _live_rows_changed(self) -> None:
        """What was predicted is not for so many rows; except for a rest or a look, that is a reason to plan anew."""
        self.next = None
        if self.current.lookahead and self.rounds >= self.looks_until:
            self.replan_at = min(self.replan_at, self.rounds)

    def observe_choice(self, seconds):
        self.measured.observe_choice(self.measured.live * self.current.budget, seconds)

    def observe_branches(self, tokens, seconds):
        self.measured.observe_drafting("branches", tokens, seconds)

    def observe_step(self, tokens, seconds):
        self.measured.observe_drafting("step", tokens, seconds)

    def observe_miss(self, kind, tokens):
        if kind in self.measured.tokens_after_miss:
            self.measured.tokens_after_miss[kind].observe(tokens)

    # ---------------------------------------------------------------- what to do

    def plan(self):
        if self.rounds < len(EXPLORED):
            self.current = self._plan_of(*EXPLORED[self.rounds])
            return self.current
        if self.next is None and self.rounds >= self.replan_at + self._delay:
            self.next = self._replan()
        if self.next is not None:
            now = self.current.lookahead, self.current.budget
            self.current, self.next = self._plan_of(*self.next), None
            if now != (self.current.lookahead, self.current.budget):
                self.spent.clear()
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

    def _replan(self) -> tuple[int, int]:
        """Returns lookahead and budget for the next rounds."""
        self.replan_at = self.rounds + min(16, max(4, self.rounds // 8))
        self._correct()
        predicted = self.predictions.of_all_plans()
        speeds = {plan: tokens / (seconds * self.corrections(plan)) for plan, (tokens, seconds) in predicted.items()}
        resting = speeds.pop((0, 0), 0.0)
        best, now = max(speeds, key=speeds.get), (self.current.lookahead, self.current.budget)
        if self.measured.live == self.rows:
            resting *= self.row_lengths.drafting_over_rest(self.measured.expected_tokens(best[0]))
        if not self.has_rested and UNSEEN * resting > speeds[best]:
            return self._look_at_rest()
        # The first rounds of a process are slower, and the beginning of a text is not like the rest of it.
        if self.drafted < ENOUGH_DRAFTED and self.measured.acceptance(1)[0] > USELESS:
            ahead = max((plan for plan in speeds if plan[1]), key=speeds.get, default=best)
            if speeds[ahead] > CLEARLY * max(speeds[best], resting):
                return ahead
        if speeds[best] < NOT_WORSE * resting:
            if self.current.lookahead == 0:
                best = self._to_try(best, speeds)
            return self._rest_or_try(best, speeds[best] > NEARLY * resting)
        return self._draft(best, now, speeds, resting)

    def _to_try(self, best: tuple[int, int], speeds: dict[tuple[int, int], float]) -> tuple[int, int]:
        """After every other rest, the best plan of the other way of drafting, if that is not out of the question."""
        self.tries += 1
        other = max((plan for plan in speeds if (plan[1] == 0) != (best[1] == 0)), key=speeds.get, default=best)
        return other if self.tries % 2 and speeds[other] > WORTH_A_LOOK * speeds[best] else best

    def _correct(self) -> None:
        """Compares what rounds of the current plan took with what is predicted of them by what is known now."""
        rounds = {}
        if self.spent and self.measured.live == self.rows:
            lookaheads, elapsed, were_ready, *paces = zip(*self.spent)
            self.measured.paces = tuple(map(statistics.fmean, paces))
            rounds = self.predictions.of_lookahead(self.current.lookahead, {}, statistics.fmean(were_ready))
            self.measured.paces = USUAL
        if self.current.budget in rounds:
            # Not what happened to be accepted, but what is to be expected of so many tokens; and what is to be
            # expected of as many hits as there were: chance is left out.
            expected = self.measured.expected_tokens(max(lookaheads))
            gained = self.rows * sum(expected[lookahead] for lookahead in lookaheads)
            tokens, seconds = rounds[self.current.budget]
            ratio = sum(elapsed) / gained * tokens / seconds
            self.corrections.observe((self.current.lookahead, self.current.budget), ratio, len(self.spent))
        self.spent.clear()

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
        most promising of all plans, for a few rounds, where what is predicted for them is not out of the question.
        """
        self.looks += 1
        self.look_at = self.rounds + min(LONGEST_BETWEEN_LOOKS, FIRST_LOOK * 2 ** (self.looks // 3))
        if resting and self.looks % 3 == 1:
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
            self.replan_at = self.rounds + self.rests.next(self.measured.plain_decoding(), is_close)
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
