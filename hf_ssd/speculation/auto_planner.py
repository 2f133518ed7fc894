"""A planner that measures, and picks what is predicted to give the most tokens per second."""

import dataclasses
import statistics

from ..config import SSDConfig
from .agenda import EXPLORED, Agenda
from .corrections import Corrections, kind_of
from .ladder import Ladder
from .measurements import Measurements
from .planner import PREPARED, FixedPlanner, Plan, Planner, first_fallback
from .predictions import Moment, Predictions
from .row_lengths import RowLengths

PATIENCE = 8  # rounds for which a new plan waits for a moment in which the draft has nothing to do
SLOW_AT_FIRST = 48  # rounds, of a process or of a setting: they correct no prediction
WORTH_ANOTHER_FALLBACK = 1.1  # predicted gain below which the fallback stays as it is
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
        self.measured, self.corrections, self.row_lengths = Measurements(config, rows), Corrections(), RowLengths(rows)
        self.predictions = Predictions(config, self.measured, vocab_size, sampled, drafts)
        self.agenda = Agenda(self.measured, self.corrections)
        self.fallback = first_fallback(config)
        self.adapts_tokens = self.predictions.adapts_tokens  # otherwise a seed gives the same tokens again
        self.compares_backups = config.fallback == "auto" and self.adapts_tokens and config.asynchronous
        # Rounds of the plan: lookahead, seconds, whether every row's speculation had been prepared, paces.
        self.spent: list[tuple[int, float, bool, float, float]] = []
        self.next: tuple[int, int] | None = None  # lookahead and budget to come
        self.kind, self.unsettled = "", 0
        self.saguaro = None
        if config.saguaro_c == "auto":
            self.saguaro = Ladder(SAGUARO_LADDER if sampled and self.adapts_tokens else (1.0,))
        self.current = self._plan_of(*EXPLORED[0])

    @property
    def rounds(self) -> int:
        """How many rounds are known."""
        return self.measured.rounds

    def observe(self, round_):
        rounds = self.rounds + 1
        now = (self.current.lookahead, self.current.budget)
        kind = kind_of(*now)
        self.unsettled = self.unsettled - 1 if kind == self.kind else self.agenda.unsettled(kind)
        self.kind = kind
        self.agenda.drafted += kind == "ahead"
        self.row_lengths.observe(round_)
        if rounds == len(EXPLORED):
            self.measured.fade()
        if rounds > len(EXPLORED):
            plain = self.measured.plain_decoding()
            if round_.lookahead == 0:
                self.agenda.rests.rested(plain)
            elif round_.elapsed:
                tokens = self.measured.expected_tokens(round_.lookahead)[-1] - self.row_lengths.fallen_behind
                self.agenda.rests.drafted(self.measured.at_usual_pace(round_.elapsed), plain * tokens)
        if self.unsettled >= 0 and rounds > len(EXPLORED):
            round_ = dataclasses.replace(round_, seconds=0.0, elapsed=0.0)
        live = self.measured.live
        self.measured.observe(round_)
        if self.measured.live != live:
            self._live_rows_changed()
        # How long a rest takes is measured, not predicted; and what few rows take says nothing of how long all take.
        if round_.elapsed and kind != "rest" and live == self.rows and rounds > SLOW_AT_FIRST:
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
        return self.agenda.due + self._delay - self.rounds

    @property
    def _delay(self) -> int:
        """For how many rounds a new plan may wait."""
        is_busy = self.current.lookahead and self.current.budget and not self.agenda.is_look
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
        if self.current.lookahead and self.rounds >= self.agenda.looks_until:
            self.agenda.due = min(self.agenda.due, self.rounds)

    def observe_choice(self, seconds):
        self.measured.observe_choice(self.measured.live * self.current.budget, seconds)

    def observe_branches(self, tokens, seconds):
        self.measured.observe_drafting("branches", tokens, seconds)

    def observe_step(self, tokens, seconds):
        self.measured.observe_drafting("step" if self.current.budget else "in turn", tokens, seconds)

    def observe_miss(self, kind, tokens):
        if kind in self.measured.tokens_after_miss:
            self.measured.tokens_after_miss[kind].observe(tokens)

    # ---------------------------------------------------------------- what to do

    def plan(self):
        if self.rounds < len(EXPLORED):
            self.current = self._plan_of(*EXPLORED[self.rounds])
            return self.current
        if self.next is None and self.rounds >= self.agenda.due + self._delay:
            self.next = self._replan()
        if self.next is not None:
            now = self.current.lookahead, self.current.budget
            self.current, self.next = self._plan_of(*self.next), None
            if now != (self.current.lookahead, self.current.budget):
                self.spent.clear()
        return self.current

    def think(self):
        # It takes a millisecond, which is better not spent before the branches grow.
        if self.next is None and self.rounds >= max(self.agenda.due, len(EXPLORED)):
            self.next = self._replan()

    @property
    def rest(self):
        # This round's outcome, and the next one's, have yet to be observed.
        return max(0, self.agenda.due - self.rounds - 2) if self.current.lookahead == 0 else 0

    @property
    def rest_seconds(self):
        return self.rest * self.measured.plain_decoding()

    def lookahead(self, known):
        most = self.current.lookahead
        if not self.adapts_tokens or self.rounds < self.agenda.looks_until:
            return most
        ready = min(known, default=most)
        alone = self.current.budget == 0
        kind = "in turn" if alone else "step"
        step, tokens = self.measured.drafting(self.measured.live, kind), self.measured.expected_tokens(most)
        speeds = [
            tokens[k] / (self.measured.verification(k, alone) + max(0, k - ready) * step) for k in range(most + 1)
        ]
        return max(range(most + 1), key=speeds.__getitem__)

    def _replan(self) -> tuple[int, int]:
        """Returns lookahead and budget for the next rounds."""
        self._correct()
        predicted = self.predictions.of_all_plans()
        lasting = {lookahead: self._lasting(lookahead) for lookahead in {plan[0] for plan in predicted}}
        speeds = {
            plan: tokens / (seconds * self.corrections(plan) * lasting[plan[0]])
            for plan, (tokens, seconds) in predicted.items()
        }
        resting = speeds.pop((0, 0), 0.0)
        plan = self.agenda.next((self.current.lookahead, self.current.budget), speeds, resting)
        if self.compares_backups and plan[1]:
            self._choose_fallback(plan[0])
        return plan

    def _lasting(self, lookahead: int) -> float:
        """By how much a call lasts longer than rounds of all rows tell, because its rows do not advance alike."""
        if self.measured.live < self.rows:
            return 1.0
        expected, fixed_share = self.measured.expected_tokens(lookahead), self.measured.fixed_share(lookahead)
        return self.row_lengths.drafting_over_rest(expected, fixed_share)

    def _correct(self) -> None:
        """Compares what rounds of the current plan took with what is predicted of them by what is known now."""
        rounds = {}
        if self.spent and self.measured.live == self.rows:
            lookaheads, elapsed, were_ready, *paces = zip(*self.spent)
            self.measured.paces = tuple(map(statistics.fmean, paces))
            moment = Moment(self.measured)
            rounds = self.predictions.of_lookahead(self.current.lookahead, moment, statistics.fmean(were_ready))
            self.measured.paces = None
        if self.current.budget in rounds:
            # Not what happened to be accepted, but what is to be expected of so many tokens; and what is to be
            # expected of as many hits as there were: chance is left out.
            expected = self.measured.expected_tokens(max(lookaheads))
            gained = self.rows * sum(expected[lookahead] for lookahead in lookaheads)
            tokens, seconds = rounds[self.current.budget]
            ratio = sum(elapsed) / gained * tokens / seconds
            self.corrections.observe((self.current.lookahead, self.current.budget), ratio, len(self.spent))
        self.spent.clear()

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
