"""Chooses the plan to follow next: the plan that is expected to give the most tokens per second.

A plan has a mode: `ahead` prepares outcomes while the target verifies (SSD), `in_turn` drafts after each outcome
(ordinary speculative decoding), `plain` does not draft, but may verify early tokens. The first rounds with a
pair are plain, and the next rounds draft in turn. Each round's record corrects the costs, acceptance and hit rates, and
from time to time the best plan of a grid is chosen by them. A mode that is not in use is probed from time to time.
"""

import threading
import weakref
from collections import Counter

from transformers.utils import logging

from ..drafting.drafts import is_fixed
from ..rounds import AHEAD, EARLY, IN_TURN, PLAIN, Plan, RoundRecord
from .cost_model import BUDGETS, LOOKAHEADS, CostModel, NoDraftCosts
from .experience import CallKind, PairKnowledge
from .fixed_plan import FixedPlan, fallback_of, nodes_of

logger = logging.get_logger(__name__)

FIRST = (1, 8)  # lookahead and budget until the costs of drafting in turn, and ahead, are known
EPOCH_ROUNDS = 8  # between choices of the plan; at first it is chosen in each round, because each teaches a lot
FIRST_EPOCHS = 24  # rounds in each of which the plan is chosen
HYSTERESIS = 1.03  # expected gain below which the plan stays as it is
CONTENTION = 1.25  # slowdown of a verification by the working draft above which a warning is logged


class Planner:
    """Chooses the plans of a call's rounds, from measurements of earlier calls with the pair too. `reason` says why."""

    def __init__(self, kind: CallKind, pair: PairKnowledge | None = None):
        self.costs = (NoDraftCosts if kind.config.drafter == EARLY else CostModel)(kind, pair)
        self.config, self.lock = kind.config, self.costs.pair.lock
        self.experience = self.costs.experience
        self.chooses_lookahead, chooses_budget = kind.config.lookahead == "auto", kind.config.budget == "auto"
        self.may_take_turns = not kind.config.asynchronous or (self.chooses_lookahead and chooses_budget)
        self.plain_gain = 1.0  # of early tokens without a draft, expected when the plan was last chosen
        self.due, self.live, self.has_warned = 0, kind.rows, False
        self.reasons: dict[str, str] = {}  # by mode, why it was last chosen
        self.reason = "the pair is not known yet"
        lookahead = FIRST[0] if self.chooses_lookahead else kind.config.lookahead
        budget = min(FIRST[1], self.costs.largest_budget(lookahead)) if chooses_budget else kind.config.budget
        first = (IN_TURN, lookahead, 0) if self.may_take_turns else (AHEAD, lookahead, budget)
        self.plan = self.first = self._plan_of(*first)

    def begin_call(self) -> None:
        with self.lock:
            self.costs.begin_call()
            if self.expects_draft:
                self.plan = Plan(PLAIN) if self.chooses_lookahead and not self.costs.knows(PLAIN) else self.first
            elif self._may_choose:
                self._choose()

    @property
    def expects_draft(self) -> bool:
        """Whether the draft is to read the text, because rounds with it follow, although a plain round may come."""
        is_known = self.costs.knows(IN_TURN if self.may_take_turns else AHEAD)
        return not is_known and PLAIN not in self.costs.seen_anyway

    def reason_of(self, records: list[RoundRecord]) -> str:
        if not records:
            return self.reason
        (mode, _), *_ = Counter(record.mode for record in reversed(records)).most_common(1)
        unknown = {PLAIN: "decoded plainly", IN_TURN: "drafted in turn", AHEAD: "drafted ahead"}[mode]
        return self.reasons.get(mode, f"the pair is not known yet: {unknown}")

    @property
    def _may_choose(self) -> bool:
        """Whether a plan can be chosen. Until the draft is known the choice is plain decoding or drafting in turn."""
        return self.chooses_lookahead or self.costs.knows(AHEAD)

    def observe(self, before: RoundRecord, now: RoundRecord) -> None:
        """Learns from a round, as [`CostModel.observe`] does, and chooses the next plan when a choice is due."""
        with self.lock:
            if self.costs.changes_durations(now):
                return self.begin_call()
            self.costs.observe(before, now)
            self.experience.prober.observe(self.costs)
            rounds = self.experience.rounds
            if self.costs.live != self.live and self.plan.mode != PLAIN:
                self.due = rounds
            is_due = rounds >= self.due
            if self.plan.mode == PLAIN and rounds % EPOCH_ROUNDS == 0 and not is_due:
                gain = self._plain_gain()  # early tokens are counted in plain rounds too
                is_due = not self.plain_gain / HYSTERESIS < gain < self.plain_gain * HYSTERESIS
            if is_due and self._may_choose:
                self._choose()

    def _choose(self) -> None:
        seen, speeds = self.experience, self._speeds()
        self.plain_gain = self._plain_gain() if self.costs.knows(PLAIN) else 1.0
        self.live, self.due = self.costs.live, seen.rounds + (EPOCH_ROUNDS if seen.rounds >= FIRST_EPOCHS else 1)
        tried = {plan: speed for plan, speed in speeds.items() if plan[0] != AHEAD or self.costs.knows(AHEAD)}
        if self.expects_draft or not tried:  # the draft is not known yet, or its measurements are forgotten
            self.plan, self.due = self.first if speeds else self.plan, seen.rounds + 1
            return
        best = max(tried, key=tried.get)
        if speeds[best] < HYSTERESIS * tried.get(seen.chosen, 0.0) and seen.rounds > 2 * EPOCH_ROUNDS:
            best = seen.chosen
        probed = seen.prober.probe(best, speeds, self.costs)
        if self.expects_draft:
            return self._choose()
        if probed is not None:
            self.due = seen.rounds + 1
        elif best[0] == PLAIN:  # plain rounds teach nothing new of drafts, and choosing would slow them down
            self.due = seen.prober.start
        seen.chosen = probed or best
        self.plan = self._plan_of(*seen.chosen)
        self._explain(speeds, "" if probed is None else "probe: ")

    def _speeds(self) -> dict[tuple[str, int, int, int], float]:
        """Returns the expected tokens per second by mode, lookahead, budget and most early tokens."""
        config, costs, speeds = self.config, self.costs, {}
        if self.chooses_lookahead and costs.knows(PLAIN):
            speeds |= {(PLAIN, 0, 0, early): costs.plain(early) for early in costs.counts(costs.rates.alone)}
        takes_turns = self.may_take_turns and costs.knows(IN_TURN)
        counts = costs.counts(costs.rates.beside) if costs.kind.workers == 1 else (0,)
        for lookahead in LOOKAHEADS if self.chooses_lookahead else (config.lookahead,):
            if takes_turns:
                speeds |= {(IN_TURN, lookahead, 0, early): costs.in_turn(lookahead, early) for early in counts}
            if config.asynchronous and (costs.knows(AHEAD) or takes_turns):
                most = min(costs.largest_budget(lookahead), BUDGETS[-1] if costs.knows(AHEAD) else FIRST[1])
                budgets = [b for b in BUDGETS if b <= most] if config.budget == "auto" else [config.budget]
                speeds |= costs.ahead(lookahead, budgets, counts)
        return speeds

    def _plain_gain(self) -> float:
        plain = [self.costs.plain(early) for early in self.costs.counts(self.costs.rates.alone)]
        return max(plain) / plain[0]

    def _plan_of(self, mode: str, lookahead: int, budget: int, early: int = 0) -> Plan:
        if mode == PLAIN:
            return Plan(PLAIN, early=early)
        is_known = mode == AHEAD and self.costs.knows(AHEAD)
        after_miss = self.costs.best_after_miss(lookahead) if is_known else lookahead
        return Plan(mode, lookahead, after_miss, budget, fallback_of(self.config), early, nodes_of(self.config))

    def _explain(self, speeds: dict, prefix: str) -> None:
        """Notes why the plan was chosen, and warns if the draft slows the target down."""
        before, chosen = self.reason, self.experience.chosen
        self.reason = self.reasons[chosen[0]] = prefix + self.costs.reason(chosen, speeds)
        if self.reason != before:
            logger.info(f"round {self.experience.rounds}: {self.reason}")
        if self.costs.contention > CONTENTION and not self.has_warned:
            self.has_warned = True
            logger.warning_once(
                f"Drafting slows verification by the factor {self.costs.contention:.1f}: target and draft share a "
                "device, its cores or its memory bandwidth. Give the draft a device of its own."
            )


_pairs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by target and draft, their [`PairKnowledge`]
_lock = threading.Lock()


def planner_for(target, draft, kind: CallKind) -> Planner | FixedPlan:
    """Returns a planner for a call of a pair; `draft` is a model, or the assistant that holds its workers."""
    if is_fixed(kind.config):
        return FixedPlan(kind.config)
    with _lock:  # measurements of earlier calls are kept while both live
        pair = _pairs.setdefault(target, weakref.WeakKeyDictionary()).setdefault(draft, PairKnowledge())
    with pair.lock:
        pair.last = Planner(kind, pair)
    return pair.last


def asks_for_half(target, draft, kind: CallKind) -> bool:
    """Whether calls before have shown that the draft needs half of the cores while both models compute."""
    pair = _pairs.get(target, {}).get(draft)
    if pair is None or kind.is_parallel or is_fixed(kind.config):
        return False
    with pair.lock:
        return pair.durations(kind).asks_for_half()


def last_planner(target, draft) -> Planner | None:
    """Returns the planner of the last planned call with this pair, whose `costs` hold the measurements."""
    pair = _pairs.get(target, {}).get(draft)
    return None if pair is None else pair.last
