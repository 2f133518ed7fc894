"""Measurements that calls with a pair of models leave to later calls: durations, and how often drafts are right."""

import copy
import threading
from dataclasses import dataclass, replace

from ..config import SSDConfig
from ..rounds import AHEAD, BY_TARGET, IN_TURN, PLAIN, RoundRecord
from .estimates import Acceptance, Average, EarlyRates, HitRates, Line
from .prober import Prober

# Share of a verification's time that a draft step takes, in turn, above which the draft has half of the cores. On 70
# simulated CPUs of 4 to 32 cores calls were 2.2 % faster by it on average, and up to 17 % with small models.
SLOW_DRAFT = 0.25
TOKENS_KEPT = 24.0  # proposed tokens that the earlier texts count like, at most, when a call begins
KINDS_KEPT = 64  # durations and experience of a pair; a service may meet a new temperature in each call


@dataclass(frozen=True)
class CallKind:
    """The properties of a call that its plan depends on."""

    config: SSDConfig
    rows: int  # batch size
    vocab_size: int  # of both models
    temperature: float | None = None  # `None` for a greedy call
    length: int = 1  # tokens of the longest prompt; measurements are shared within classes that span a factor of 4
    workers: int = 1  # drafts, each of which prepares a whole budget
    is_parallel: bool = False  # whether a forward pass of the draft gives all tokens of its branches
    has_half: bool = False  # whether the draft has half of the CPU cores while both compute, not its usual share
    ends_together: bool = True  # whether the call ends with its slowest row; the rows of a running batch end alone


class Durations:
    """Seconds of the parts of a round, each mode's apart, because it has its own share of the cores."""

    def __init__(self):
        plain = Line()
        plain.like = in_turn = Line(smaller=plain)
        self.verification = {PLAIN: plain, IN_TURN: in_turn, AHEAD: Line(like=in_turn)}
        self.step = {IN_TURN: Line(), AHEAD: Line()}  # a pass that drafts just in time
        self.branches = Line(smaller=self.step[AHEAD])  # a pass that grows branches
        self.choosing = Average(memory=0.95)  # the choice of outcomes, without the pass that feeds the speculation
        self.unexplained = {AHEAD: Line(0.1), IN_TURN: Line(0.1)}  # a round besides all measured parts, by budget
        self.tokens = self.seconds = 0.0  # tokens that each row has gained in all rounds, and their time
        self.used, self.rounds = {}, 0  # by mode, the last round in which the target followed it; all rounds

    def knows(self, mode: str) -> bool:
        """Whether a round of this mode was measured."""
        parts = {PLAIN: (), IN_TURN: (self.step[IN_TURN],), AHEAD: (self.branches, self.verification[AHEAD])}[mode]
        return any(line.count for line in self.verification.values()) and all(line.count for line in parts)

    def asks_for_half(self) -> bool:
        """Whether a draft step, which took turns with the target on all cores, is so slow that half of them pay."""
        step, verification = self.step[IN_TURN], self.verification[IN_TURN]
        return verification.count > 0 and step.seconds.value > SLOW_DRAFT * verification.seconds.value

    def forget(self, modes: set[str]) -> None:
        """Forgets the measurements of these modes of drafting, so that they are made again."""
        for mode in modes:
            for by_mode in (self.verification, self.step, self.unexplained):
                by_mode[mode].forget()
        if AHEAD in modes:
            self.branches.forget()
            self.choosing.restart(0.0, 0.0)

    def observe(self, before: RoundRecord, now: RoundRecord, kind: CallKind) -> None:
        rows, self.rounds = len(before.live) or kind.rows, self.rounds + 1
        self.used[now.mode] = self.rounds
        if now.verify_seconds:  # a call's first round never comes as `now`: it is slow for reasons of its own
            tokens = (len(now.live) or rows) * (max(now.lookahead, now.nodes) + 1)
            self.verification[now.mode].observe(tokens, now.verify_seconds)
        elapsed = now.received_at - before.received_at
        if before.received_at:
            self.seconds += elapsed
            self.tokens += sum(before.accepted[row] + 1 for row in before.live) / rows
        if now.mode == PLAIN or not before.live:
            return
        budget = now.budget // kind.workers  # of each worker; the record has the sum over all workers
        if now.passes:
            tokens = (now.grown + 1) * budget + before.lookahead + 1 if kind.is_parallel else budget
            self.branches.observe(rows * tokens, now.grow_seconds / now.passes)
            feeding = 0.0 if kind.is_parallel else self.branches(rows * (before.lookahead + 1))
            self.choosing.observe(max(0.0, now.choose_seconds - feeding))
        if now.steps and before.mode != PLAIN:  # otherwise the draft has read the tokens of plain rounds as well
            tokens = max(now.proposed(row) for row in now.live) + 1 if kind.is_parallel else 1
            self.step[now.mode].observe(rows * tokens, now.answer_seconds / now.steps)
        if before.mode == now.mode and before.received_at:
            explained = max(before.verify_seconds, now.choose_seconds + now.grow_seconds) + now.answer_seconds
            self.unexplained[now.mode].observe(budget, max(0.0, elapsed - explained))


class Rates:
    """How often proposals are right: drafted tokens, and early ones without a draft (`alone`) and `beside` one."""

    def __init__(self, memory: float):
        self.drafted, self.alone, self.beside = Acceptance(memory), EarlyRates(memory), EarlyRates(memory)
        early = [(rates.share, *rates.acceptance.places) for rates in (self.alone, self.beside)]
        self.averages = [*self.drafted.places, *early[0], *early[1]]

    def restart(self, ever: "Rates") -> None:
        """Starts from the rates of all texts, because a new text is not like the end of the last text."""
        for mine, theirs in zip(self.averages, ever.averages):
            mine.restart(theirs.value, min(theirs.weight, TOKENS_KEPT))

    def observe(self, before: RoundRecord, now: RoundRecord) -> None:
        """Learns from the tokens of a round. Early ones are counted, verified or not, in the round after theirs."""
        for row in now.live:
            if now.sources[row] not in BY_TARGET:
                self.drafted.observe(now.of_chain(row), now.proposed(row))
        for rates, given in ((self.alone, now.early_alone), (self.beside, now.early_beside)):
            for row in before.live if given else ():
                if given[row] >= 0:
                    rates.observe(given[row], before.accepted[row] + 1)


class Experience:
    """How often drafts are right, in calls of a pair with the same settings, batch size, length and temperature."""

    def __init__(self, config: SSDConfig):
        self.rates = Rates(memory=0.999)
        self.hit_rates = HitRates(config)
        self.prober = Prober()
        self.chosen: tuple[str, int, int, int] | None = None  # the last mode, lookahead, budget and most early tokens
        self.rounds = 0


class PairKnowledge:
    """Measurements of the calls with a pair, and the planner of its last call. Threads share them under the lock."""

    def __init__(self):
        self.known: dict[tuple, Durations | Experience] = {}  # the latest last
        self.last, self.lock = None, threading.RLock()

    def durations(self, kind: CallKind) -> Durations:
        config = kind.config
        same = kind.rows, kind.is_parallel, config.cuda_graphs, config.pack_weights, kind.has_half
        return self._kept(kind, same, (), Durations)

    def experience(self, kind: CallKind) -> Experience:
        fallback = kind.config.fallback if isinstance(kind.config.fallback, str) else "custom"
        same = kind.rows, kind.is_parallel, fallback, repr(replace(kind.config, fallback="auto"))
        return self._kept(kind, same, (kind.temperature,), lambda: Experience(kind.config))

    def _kept(self, kind: CallKind, same: tuple, near: tuple, make):
        """Returns measurements, which begin as those of a kind of call that differs in its length or `near` alone."""
        key = same, (kind.length.bit_length() // 2, *near)
        if key not in self.known:
            others = [known for (other, _), known in self.known.items() if other == same]
            self.known[key] = copy.deepcopy(others[-1]) if others else make()
            if isinstance(self.known[key], Experience):  # that of other texts counts little
                self.known[key].rates.restart(self.known[key].rates)
        self.known[key] = self.known.pop(key)
        if len(self.known) > KINDS_KEPT:
            del self.known[next(iter(self.known))]
        return self.known[key]
