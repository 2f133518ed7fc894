"""
Chooses the plan to follow next: the plan that is expected to give the most tokens per second.

A plan has a mode: `ahead` prepares outcomes while the target verifies (SSD), `in_turn` drafts after each outcome
(ordinary speculative decoding), `plain` does not draft, but may verify n-grams of the text. The first rounds with a
pair are plain, and the next ones draft in turn. Their costs say whether drafting ahead may pay; it is tried as soon as
the time that drafting has saved pays for the trial. Each round's record corrects the costs, acceptance and hit rates,
and from time to time the best plan of a grid is chosen by them. A mode that is not in use has no new records, so it is
probed from time to time. If only a quicker draft would make drafting worthwhile, its costs are measured again.
"""

import math
import threading
from collections import Counter

from transformers.utils import logging

from ..config import SSDConfig
from ..drafting.ngrams import LONGEST_NGRAM
from ..rounds import AHEAD, IN_TURN, MTP, PLAIN, PRIMARY, Plan, RoundRecord
from .cost_model import BUDGETS, LOOKAHEADS, CostModel
from .experience import Durations, Experience
from .lookup_costs import LookupCosts
from .reasons import reason_for

logger = logging.get_logger(__name__)

FIRST = (1, 8)  # lookahead and budget until the costs of drafting in turn, and ahead, are known
EPOCH_ROUNDS = 8  # between choices of the plan; at first it is chosen in each round, because each teaches a lot
FIRST_EPOCHS = 24  # rounds in each of which the plan is chosen
HYSTERESIS = 1.03  # expected gain below which the plan stays as it is
PROBE_ROUNDS = 6  # rounds of a mode that was not used for long
LONGEST_BETWEEN_PROBES = 512  # rounds
PROBE_SHARE = 0.02  # largest share of the time in which a draft reads texts only to be probed
PROBED_GAIN = 1.2  # probe a mode if it would win with this factor on its estimated speed
TRIAL_COST = 3.0  # plain steps that a trial of drafting ahead may lose
CLEAR_GAIN = 2.0  # expected gain with which drafting ahead is tried at once
CONTENTION = 1.25  # slowdown of a verification by the working draft above which a warning is logged
WORTH_NGRAMS = 1.02  # expected gain below which n-grams do not compete with the draft


class Planner:
    """
    Chooses mode, lookahead, budget and n-grams for the rounds of a call.

    Args:
        config (`SSDConfig`): The settings, of which lookahead, budget or both are `"auto"`. Others are not changed.
        rows (`int`): Batch size.
        vocab_size (`int`): Vocabulary size of both models.
        sampled (`bool`): Whether tokens are sampled.
        workers (`int`, *optional*, defaults to 1): Number of drafts, each of which prepares a whole budget.
        is_parallel (`bool`, *optional*): Whether the draft gives all tokens of its branches in one forward pass.
        durations ([`Durations`], *optional*), experience ([`Experience`], *optional*): Measurements of earlier calls.
        lock (`threading.Lock`, *optional*): Held while these two, which other threads share, are read and written.

    Attributes:
        costs ([`CostModel`]): The estimates for the pair.
        plan ([`Plan`]): The plan for the next round.
        reason (`str`): Why this plan was chosen, in a sentence with its numbers.
    """

    def __init__(
        self,
        config: SSDConfig,
        rows: int,
        vocab_size: int,
        sampled: bool,
        workers: int = 1,
        is_parallel: bool = False,
        durations: Durations | None = None,
        experience: Experience | None = None,
        lock: "threading.Lock | None" = None,
    ):
        self.config, self.workers, self.lock = config, workers, lock or threading.Lock()
        kind = LookupCosts if config.drafter == "ngram" else CostModel
        self.costs = kind(config, rows, vocab_size, sampled, workers, is_parallel, durations, experience)
        self.durations, self.experience = self.costs.durations, self.costs.experience
        self.chooses_lookahead = config.lookahead == "auto"
        self.may_take_turns = not config.asynchronous or (self.chooses_lookahead and config.budget == "auto")
        is_named = isinstance(config.fallback, str) and config.fallback not in ("auto", MTP)
        self.fallback = config.fallback if is_named else PRIMARY
        self.may_look_up = self.chooses_lookahead and config.drafter != "ngram" and config.fallback == "auto"
        self.may_compete = self.may_look_up and workers == 1
        self.lookups: dict[tuple, int] = {}  # most tokens of an n-gram, by mode, lookahead and budget; 0 if not there
        self.plain_gain = 1.0  # of n-grams without a draft, expected when the plan was last chosen
        self.due, self.live, self.has_warned = 0, rows, False
        self.reasons: dict[str, str] = {}  # by mode, why it was last chosen
        lookahead = FIRST[0] if self.chooses_lookahead else config.lookahead
        budget = min(FIRST[1], self.costs.largest_budget(lookahead)) if config.budget == "auto" else config.budget
        self.reason = "the pair is not known yet"
        self.plan = self.first = self._plan_of(IN_TURN if self.may_take_turns else AHEAD, lookahead, budget)

    # ---------------------------------------------------------------- interface of the loop

    def begin_call(self) -> None:
        """Begins the call, once it has its turn with the draft."""
        with self.lock:
            self.costs.begin_call()
            self.live = self.costs.rows
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
        """Returns why the most frequent mode of these rounds was chosen."""
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
        """
        Learns from a round, as [`CostModel.observe`] does, and chooses the next plan when a choice is due.
        """
        with self.lock:
            seen = self.experience
            self.costs.observe(before, now)
            self.durations.used[now.mode] = self.durations.rounds
            if seen.rounds <= seen.probe_until and self.costs.knows(PLAIN):
                seen.probe_at += math.ceil(self.costs.reading / (PROBE_SHARE * self.costs.seconds_to_verify(PLAIN, 0)))
            if self.costs.live != self.live and self.plan.mode != PLAIN:
                self.due = seen.rounds
            is_due = seen.rounds >= self.due
            if self.plan.mode == PLAIN and seen.rounds % EPOCH_ROUNDS == 0 and not is_due:
                gain, _ = self._plain_gain()  # n-grams are counted in plain rounds too
                is_due = not self.plain_gain / HYSTERESIS < gain < self.plain_gain * HYSTERESIS
            if is_due and self._may_choose:
                self._choose()

    # ---------------------------------------------------------------- the choice

    def _choose(self) -> None:
        seen, speeds = self.experience, self._speeds()
        self.live, self.due = self.costs.live, seen.rounds + (EPOCH_ROUNDS if seen.rounds >= FIRST_EPOCHS else 1)
        tried = {plan: speed for plan, speed in speeds.items() if plan[0] != AHEAD or self.costs.knows(AHEAD)}
        if self.expects_draft or not tried:  # the draft is not known yet, or its measurements are forgotten
            self.plan, self.due = self.first if speeds else self.plan, seen.rounds + 1
            return
        best = max(tried, key=tried.get)
        if speeds[best] < HYSTERESIS * tried.get(seen.chosen, 0.0) and seen.rounds > 2 * EPOCH_ROUNDS:
            best = seen.chosen
        chosen = self._probe(best, speeds) or best
        if self.expects_draft:
            return self._choose()
        if chosen == best and best[0] == PLAIN:
            self.due = seen.probe_at  # plain rounds teach nothing new of drafts, and choosing would slow them down
        seen.chosen = chosen
        self.plan = self._plan_of(*chosen)
        self._explain(chosen, speeds, best)

    def _speeds(self) -> dict[tuple[str, int, int], float]:
        """
        Returns the expected tokens per second of all plans, by mode, lookahead and budget, each with the n-grams that
        are best for it. Plain decoding drafts nothing, and looks up n-grams alone where they pay.
        """
        config, costs, speeds = self.config, self.costs, {}
        lookaheads = LOOKAHEADS if self.chooses_lookahead else (config.lookahead,)
        self.lookups = {}
        if self.chooses_lookahead and costs.knows(PLAIN):
            self.plain_gain, self.lookups[PLAIN, 0, 0] = self._plain_gain()
            speeds[PLAIN, 0, 0] = self.plain_gain * costs.plain()
        takes_turns = self.may_take_turns and costs.knows(IN_TURN)
        lookups = self._lookups
        for lookahead in lookaheads:
            found = {(IN_TURN, 0, lookup): costs.in_turn(lookahead, lookup) for lookup in lookups if takes_turns}
            if config.asynchronous and (costs.knows(AHEAD) or takes_turns):
                most = min(costs.largest_budget(lookahead), BUDGETS[-1] if costs.knows(AHEAD) else FIRST[1])
                budgets = [b for b in BUDGETS if b <= most] if config.budget == "auto" else [config.budget]
                after_miss = None if self.chooses_lookahead else lookahead
                ahead = costs.ahead(lookahead, budgets, after_miss, lookups)
                found |= {(AHEAD, *place): speed for place, speed in ahead.items()}
            for (mode, budget, lookup), speed in found.items():
                plan = mode, lookahead, budget
                if not lookup or speed > WORTH_NGRAMS * speeds[plan]:
                    speeds[plan], self.lookups[plan] = speed, lookup
        return speeds

    @property
    def _lookups(self) -> tuple[int, ...]:
        """The numbers of tokens that n-grams may have beside a draft, 0 for none."""
        return (0, LONGEST_NGRAM) if self.may_compete and self.costs.repeats(self.costs.beside) else (0,)

    def _plain_gain(self) -> tuple[float, int]:
        """Returns the expected gain by n-grams over plain decoding, and their most tokens; 1 and 0 for none."""
        costs = self.costs
        if self.may_look_up and costs.repeats(costs.alone):
            gain = costs.plain(LONGEST_NGRAM) / costs.plain()
            if gain > WORTH_NGRAMS:
                return gain, LONGEST_NGRAM
        return 1.0, 0

    def _probe(self, best: tuple, speeds: dict) -> tuple | None:
        """
        Returns the plan with which to probe another mode, if any. Unused modes have no new data, so from time to time a
        mode that may still be the best is probed for a few rounds. Drafting ahead is tried earlier if it may be the
        best by the costs of drafting in turn, and the trial is paid for or expected to gain much. If no other mode of
        drafting is worth a probe, but a draft that takes no time would be, these modes are measured again: the machine
        may have been busy.
        """
        seen, used = self.experience, self.durations.used
        of_mode = {plan[0]: plan for plan in sorted(speeds, key=speeds.get)}  # the best plan of each mode
        is_trial = AHEAD in of_mode and not self.costs.knows(AHEAD)
        hopeful = [mode for mode in of_mode if mode != best[0] and PROBED_GAIN * speeds[of_mode[mode]] > speeds[best]]
        hopeful = [mode for mode in hopeful if mode not in self.costs.seen_anyway]
        if is_trial and AHEAD in hopeful and speeds[of_mode[AHEAD]] < CLEAR_GAIN * speeds[best]:
            if not self._can_pay_a_trial():
                hopeful.remove(AHEAD)
        if seen.rounds < seen.probe_until:  # a probe is under way
            pass
        elif is_trial and AHEAD in hopeful and AHEAD not in used:
            seen.probed, seen.probe_until = AHEAD, seen.rounds + PROBE_ROUNDS
        elif seen.rounds >= seen.probe_at:
            seen.probe_distance = min(2 * seen.probe_distance, LONGEST_BETWEEN_PROBES)
            seen.probe_at, seen.probe_until = seen.rounds + seen.probe_distance, seen.rounds + PROBE_ROUNDS
            seen.probed = min(hopeful, key=lambda mode: used.get(mode, -1), default=None)
            is_hopeless = not {IN_TURN, AHEAD} & {*hopeful}
            if is_hopeless and self.costs.may_reach(PROBED_GAIN * speeds[best]):
                self.durations.forget({IN_TURN, AHEAD} - {best[0]})
                return None
        else:
            return None
        if seen.probed not in hopeful:
            seen.probe_until = seen.rounds
            return None
        self.due = seen.rounds + 1
        return of_mode[seen.probed]

    def _can_pay_a_trial(self) -> bool:
        """Whether the time that drafting has saved, or a small share of all time, pays for trying to draft ahead."""
        plain, costs = self.costs.seconds_to_verify(PLAIN, 0), self.durations
        return costs.tokens * plain - (1 - PROBE_SHARE) * costs.seconds > TRIAL_COST * plain

    def _plan_of(self, mode: str, lookahead: int, budget: int) -> Plan:
        lookup = self.lookups.get((mode, lookahead, budget), 0)
        if mode == PLAIN:
            return Plan(PLAIN, lookup=lookup)
        after_miss = self.costs.best_after_miss(lookahead) if self.chooses_lookahead and mode == AHEAD else lookahead
        if not self.costs.knows(AHEAD):
            after_miss = lookahead
        budget = budget if mode == AHEAD else 0
        return Plan(mode, lookahead, after_miss, budget, self.fallback, self.config.saguaro_c, lookup)

    # ---------------------------------------------------------------- the reason

    def _explain(self, chosen: tuple, speeds: dict, best: tuple) -> None:
        before, costs = self.reason, self.costs
        self.reason = reason_for(chosen, speeds, costs, self.lookups.get(chosen, 0))
        if chosen != best:
            self.reason = f"probe: {self.reason}"
        self.reasons[chosen[0]] = self.reason
        if self.reason != before:
            logger.info(f"round {self.experience.rounds}: {self.reason}")
        if costs.contention > CONTENTION and not self.has_warned:
            self.has_warned = True
            logger.warning_once(
                f"Drafting slows verification by the factor {costs.contention:.1f}: target and draft share a device, "
                "its cores or its memory bandwidth. Give the draft a device of its own."
            )
