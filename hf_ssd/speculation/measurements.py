"""What a draft measures of a pair of models while it drafts, and the averages that predictions are made of."""

import math
import statistics

from ..config import SSDConfig
from .costs import Average, LinearCost
from .hit_rates import HitRates
from .pace import Pace
from .planner import BACKUPS, Round

LONGEST_LOOKAHEAD = 16
ROUNDS_PER_TRANSIT = 4  # for one of which it is seen how late the draft was, which takes a while
STALE, FADED = 24, 0.2  # rounds after which a measured time is old; what is left of what was measured at first
PRIOR_TESTS = 4  # drafted tokens that the prior acceptance rate counts for
TESTS_BEFORE = 24  # drafted tokens that what is known of earlier texts counts for when a new one begins


class Measurements:
    """
    Running estimates. Times are in seconds, and apart for when the other model works as well and when it waits: two
    models on one machine share its memory. They are compared with each other, so the machine's pace, which may be slow
    for a while, is taken out of them ([`~hf_ssd.speculation.pace.Pace`]). Predictions are for as many rows as are not
    finished.

    Args:
        config (`SSDConfig`): Gives the priors.
        rows (`int`): Batch size.
    """

    def __init__(self, config: SSDConfig, rows: int):
        self.config, self.rows, self.live = config, rows, rows
        self.rounds = self.plain_at = 0  # when plain decoding was last measured
        self.verification_beside, self.verification_alone = LinearCost(0.03), LinearCost(0.03)
        self.verification_of_the_rest = LinearCost(0.03)  # of the rows that remain when others are finished
        self.verification_beside.like, self.verification_alone.like = self.verification_alone, self.verification_beside
        self.verification_of_the_rest.like = self.verification_beside
        self.branches, self.step, self.step_in_turn = LinearCost(0.02), LinearCost(0.02), LinearCost(0.02)
        self.target_pace, self.draft_pace = Pace(), Pace()
        self.paces: tuple[float, float] | None = None  # of both, for which estimates are made; their usual ones
        self.durations: dict[tuple[str, int], list[float]] = {}  # of this round, by what for how many tokens
        self.verified_lookaheads: set[int] = set()
        self.plain = Average(0.0, 0.0, memory=0.95)
        self.choosing = LinearCost(0.003, memory=0.95)
        self.transit = Average(3e-4, 4.0)
        self.transit_beside = LinearCost(0.0)  # the same for a draft at work, by how busy it is
        self.accepted = [Average(0.0, 0.0) for _ in range(LONGEST_LOOKAHEAD)]
        self.accepted_ever = [Average(0.0, 0.0, memory=0.999) for _ in range(LONGEST_LOOKAHEAD)]
        self.tokens_after_miss = {"ngram": Average(1.0, 1.0)}
        self.hit_rates = HitRates(config)
        self._rates: tuple[list[float], float] | None = None  # of acceptance, as far as it is known

    def begin(self) -> None:
        """A call begins: no row is finished, and the texts are like texts in general, not like the last one's end."""
        self.live = self.rows
        for accepted, ever in zip(self.accepted, self.accepted_ever):
            accepted.restart(ever.value, min(ever.weight, TESTS_BEFORE))
        self._rates = None

    def observe(self, round_: Round) -> None:
        """Learns from a round."""
        live = [row for row, k in enumerate(round_.accepted) if k >= 0]
        self.live = len(live) or self.rows
        self.rounds += 1
        self._observe_paces(round_.elapsed or round_.seconds)
        if round_.seconds and round_.lookahead not in self.verified_lookaheads:
            self.verified_lookaheads.add(round_.lookahead)  # the first of a shape is slow for reasons of its own
        elif round_.seconds and not round_.lookahead and not round_.budget:
            if self.live == self.rows:
                self.target_pace.observe((False, 0), round_.seconds)
                self.plain.observe(round_.seconds / self.target_pace.factor)
                self.plain_at = self.rounds
        elif round_.seconds:
            cost = self.verification_beside if round_.budget else self.verification_alone
            if self.live < self.rows:
                cost = self.verification_of_the_rest
            else:
                self.target_pace.observe((round_.budget > 0, round_.lookahead), round_.seconds)
            cost.observe(self._drafted(round_.lookahead), round_.seconds / self.target_pace.factor)
            if round_.transit is not None:
                self._observe_transit(round_)
        for row in live:
            k = round_.accepted[row]
            if round_.sources[row] in BACKUPS:
                continue
            for i in range(min(k + 1, round_.lookahead, LONGEST_LOOKAHEAD)):
                self.accepted[i].observe(i < k)
                self.accepted_ever[i].observe(i < k)
        self._rates = None
        if round_.budget:
            self.hit_rates.observe(round_, self.acceptance(round_.lookahead))

    def _observe_transit(self, round_: Round) -> None:
        transit = min(round_.transit, round_.seconds)
        if not round_.budget:
            self.transit.observe(transit)
        elif self.rounds % ROUNDS_PER_TRANSIT == 0:
            self.transit_beside.observe(self.busy(round_.lookahead, self.live * round_.budget), transit)

    def observe_drafting(self, kind: str, tokens: int, seconds: float) -> None:
        """
        Learns what a forward pass of the draft took: over a token of each `"branches"`, or a `"step"` in time, which is
        slower `"in turn"`, by a draft that has waited meanwhile.
        """
        self._passes(kind).observe(tokens, seconds / self.draft_pace.factor)
        if self.live == self.rows:
            self.durations.setdefault((kind, tokens), []).append(seconds)

    def _passes(self, kind: str) -> LinearCost:
        return {"branches": self.branches, "step": self.step, "in turn": self.step_in_turn}[kind]

    def observe_choice(self, outcomes: int, seconds: float) -> None:
        """Learns how long it took from an answer until so many outcomes for the next one were chosen."""
        self.choosing.observe(outcomes, seconds / self.draft_pace.factor)

    def fade(self) -> None:
        """The first rounds of a process are slower: what they took soon gives way to what later ones take."""
        for cost in (self.verification_beside, self.verification_alone, self.choosing):
            cost.fade(FADED)
        for cost in (self.branches, self.step, self.step_in_turn):
            cost.fade(FADED)

    def _observe_paces(self, seconds: float) -> None:
        """A round went by, which took so long."""
        self.target_pace.advance(seconds)
        self.draft_pace.advance(seconds)
        # Each size by itself: the other way round, a cost that is taken to be too low would look like a slow moment.
        for what, durations in self.durations.items():
            self.draft_pace.observe(what, statistics.fmean(durations))
        self.durations.clear()

    def at_usual_pace(self, seconds: float) -> float:
        """What the target took so long for just now, in seconds of a machine at its usual pace."""
        return seconds / self.target_pace.factor * self.target_pace.usual

    # ---------------------------------------------------------------- estimates

    @property
    def _target_pace(self) -> float:
        return self.paces[0] if self.paces else self.target_pace.usual

    @property
    def _draft_pace(self) -> float:
        return self.paces[1] if self.paces else self.draft_pace.usual

    def verification(self, lookahead: int, alone: bool) -> float:
        """Seconds from having a speculation to the next one's arrival, if it is ready: verification and messages."""
        first, second = self.verification_alone, self.verification_beside
        if not alone:
            first, second = second, first
        if self.live < self.rows:
            first, second = self.verification_of_the_rest, first if first.observations else second
        cost = first if first.observations else second
        return max(1e-6, cost(self._drafted(lookahead)) * self._target_pace + self.transit.value)

    def fixed_share(self, lookahead: int) -> float:
        """How much of the time of a verification of all rows one would take of none."""
        cost = self.verification_beside if self.verification_beside.observations else self.verification_alone
        of_all = cost(lookahead)
        return min(1.0, max(0.0, cost(-1) / of_all)) if of_all else 1.0

    def _drafted(self, lookahead: int) -> float:
        """The lookahead at which a verification of all rows has as many tokens as this one of those not finished."""
        return (lookahead + 1) * self.live / self.rows - 1

    def plain_decoding(self) -> float:
        """
        Seconds of a round without a draft. Measured by itself: a target that never waits computes faster than one that
        does, on a processor that sleeps while it waits.
        """
        of_these = max(1e-6, self.verification(0, alone=True) - self.transit.value)
        if not self.plain.weight:
            return of_these
        of_all = self.verification_alone(0) * self._target_pace
        return self.plain.value * self._target_pace * (of_these / of_all if self.live < self.rows and of_all else 1.0)

    @property
    def plain_is_old(self) -> bool:
        """Whether the machine may have become slower or faster since plain decoding was measured."""
        return self.rounds - self.plain_at > STALE

    def drafting(self, tokens: int, kind: str) -> float:
        """Seconds of one forward pass of the draft. See [`~Measurements.observe_drafting`] for `kind`."""
        alike = (self._passes(kind), self.step, self.step_in_turn, self.branches)
        known = next((cost for cost in alike if cost.observations), alike[0])
        return max(1e-6, known(tokens) * self._draft_pace)

    def choice(self, outcomes: int) -> float:
        """Seconds from an answer until so many outcomes for the next one are chosen."""
        return max(0.0, self.choosing(outcomes) * self._draft_pace)

    def busy(self, lookahead: int, outcomes: int) -> float:
        """Returns [`busy_share`] of a round with so many outcomes of all rows."""
        growth, verification = self.drafting(outcomes, "branches"), self.verification(lookahead, alone=False)
        return busy_share(lookahead, self.choice(outcomes), growth, verification)

    def lateness(self, busy: float) -> float:
        """
        How much later than on average a draft that is so busy sees an outcome, in seconds. Durations vary: who is done
        just in time is late more often than who is done early.
        """
        return self.transit_beside.slope * (busy - self.transit_beside.units.value)

    def acceptance(self, lookahead: int) -> list[float]:
        """Chance of acceptance by position; a position that was hardly tested looks like all of them together."""
        if self._rates is None:
            tested = math.fsum(average.weight for average in self.accepted) + PRIOR_TESTS
            good = math.fsum(average.total for average in self.accepted) + PRIOR_TESTS * self.config.acceptance_rate
            together = good / tested
            self._rates = [(average.total + 8 * together) / (average.weight + 8) for average in self.accepted], together
        rates, together = self._rates
        return rates[:lookahead] + [together] * (lookahead - len(rates))

    def expected_tokens(self, lookahead: int) -> list[float]:
        """Expected tokens of a round with 0 to `lookahead` drafted tokens."""
        tokens, reached = [1.0], 1.0
        for rate in self.acceptance(lookahead):
            reached *= rate
            tokens.append(tokens[-1] + reached)
        return tokens


def busy_share(lookahead: int, choice: float, growth: float, verification: float) -> float:
    """The share of a verification for which the draft chooses outcomes and grows branches, at most 1."""
    return min(1.0, (choice + lookahead * growth) / verification)
