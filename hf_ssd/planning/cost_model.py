"""Expected tokens and seconds of a round of each plan: the formulas of [`theory`] with measured parts."""

import copy
import math

from .. import theory
from ..rounds import AHEAD, EARLY, EARLY_TITLE, IN_TURN, LONGEST_EARLY, PLAIN, RoundRecord
from .estimates import EarlyRates, Line
from .experience import CallKind, PairKnowledge, Rates
from .fixed_plan import nodes_of

LOOKAHEADS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)  # tokens
BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # outcomes of each row
ROWS_COMPARED = 10.0  # rows that were evaluated, the prior included, before early tokens are planned
RARE = 0.02  # share of rows with early tokens below which none are planned
ROUNDS = 64  # of a call whose slowest row is compared with the mean row
MEMORY_FOR_Q = 2**29  # bytes for the distributions of prepared tokens


class CostModel:
    """Estimates the speed of each plan in a call, from durations of measured rounds and counted acceptance and hits."""

    seen_anyway: tuple[str, ...] = ()  # modes that need no probe, because rounds of other modes measure them too

    def __init__(self, kind: CallKind, pair: PairKnowledge | None = None):
        self.kind, self.pair = kind, PairKnowledge() if pair is None else pair
        self.durations = self.of_pair = self.pair.durations(kind)
        self.experience = self.pair.experience(kind)
        self.rates = Rates(memory=0.99)  # of the texts of this call
        self.reading = 0.0  # seconds that the last round lost because the draft read text that went by without it
        q = 4 * kind.rows * kind.vocab_size  # bytes of the distributions of a token of each row
        self.most_q = 10**9 if kind.temperature is None else MEMORY_FOR_Q // q  # prepared tokens of a row
        self.most_states = 10**9  # of a row, each for a prepared token
        self.begin_call()

    def knows(self, mode: str) -> bool:
        return self.durations.knows(mode)

    def begin_call(self) -> None:
        self.live = self.kind.rows  # that are not finished
        self.rates.restart(self.experience.rates)

    def changes_durations(self, now: RoundRecord) -> bool:
        """Whether other durations count from now on: while a worker starts, the target has its share of the cores."""
        starts = now.divided and now.mode != AHEAD
        if starts == (self.durations is not self.of_pair):
            return False
        self.durations = copy.deepcopy(self.of_pair) if starts else self.of_pair
        return True

    def observe(self, before: RoundRecord, now: RoundRecord) -> None:
        """Learns from a round, whose record says how the draft has answered the outcome of the round before."""
        self.live = len(now.live) or len(before.live) or self.kind.rows
        elapsed, starts = now.received_at - before.received_at, before.mode == PLAIN != now.mode
        self.reading = max(0.0, elapsed - self.seconds_to_verify(PLAIN, 0)) if starts else 0.0
        self.most_states = now.states or self.most_states
        self.experience.rounds += 1
        self.durations.observe(before, now, self.kind)
        for rates in (self.rates, self.experience.rates):
            rates.observe(before, now)
        if now.mode != PLAIN and now.budget and now.ranks:
            self.experience.hit_rates.observe(before, now, self.acceptance)

    def acceptance(self, lookahead: int) -> list[float]:
        """Returns the chance of each drafted token to be accepted if the tokens before it were."""
        return self.rates.drafted.rates(lookahead, self.kind.config.acceptance_rate)

    def tokens(self, lookahead: int) -> list[float]:
        """Returns the tokens that a row is expected to gain in a round with 0 to `lookahead` drafted tokens."""
        return theory.expected_tokens_by_lookahead(self.acceptance(lookahead))

    def hit_rate(self, lookahead: int, budgets: list[int]) -> list[float]:
        """Returns the expected hit rate of a row for each budget of each worker."""
        return self.experience.hit_rates(self.acceptance(lookahead), [n * self.kind.workers for n in budgets])

    def largest_budget(self, lookahead: int) -> int:
        """Returns how many outcomes of each row fit the memory, at least 1."""
        return max(1, min(self.most_q, self.most_states) // max(1, lookahead))

    def counts(self, early: EarlyRates) -> tuple[int, ...]:
        """Returns the numbers of early tokens to choose from, where they come as often as these rates say."""
        compared, tested = self.experience.rates.alone.share.weight, early.acceptance.places[0].weight
        may_pay = compared >= ROWS_COMPARED and tested > 0 and early.share.value > RARE
        config = self.kind.config
        is_free = config.lookahead == config.fallback == "auto" and config.drafter != EARLY
        return (0, LONGEST_EARLY) if is_free and may_pay else (0,)

    def _gain(self, rates: EarlyRates, early: int, lookahead: int = 0) -> tuple[float, float]:
        """Returns the share of rows with `early` tokens, not drafted ones, and the tokens of the row that counts."""
        share, drafted = rates.share.value if early else 0.0, self.tokens(lookahead)
        own = theory.expected_tokens_by_lookahead(rates.acceptance.rates(early, self.kind.config.acceptance_rate))
        longest = range(max(early, lookahead) + 1)
        of_all = [share * own[min(k, early)] + (1 - share) * drafted[min(k, lookahead)] for k in longest]
        return share, theory.expected_tokens_of_slowest_row(of_all, self.live if self.kind.ends_together else 1, ROUNDS)

    def seconds_to_verify(self, mode: str, lookahead: int) -> float:
        nodes = max(lookahead, nodes_of(self.kind.config)) if lookahead else 0
        tokens, lines = self.live * (nodes + 1), self.durations.verification
        known = [lines[mode]] if lines[mode].count else [line for line in lines.values() if line.count]
        return max(1e-6, min(line(tokens) for line in known)) if known else math.nan

    def _seconds_to_verify_some(self, mode: str, lookahead: int, early: int, share: float) -> float:
        """Returns the seconds of a verification if this share of the rows has so many `early` tokens."""
        none = (1 - share) ** self.live
        wide = self.seconds_to_verify(mode, max(lookahead, early))
        return none * self.seconds_to_verify(mode, lookahead) + (1 - none) * wide

    def seconds_to_draft(self, mode: str, lookahead: int) -> float:
        """Returns the seconds to draft `lookahead` tokens just in time; almost none if unknown."""
        steps, tokens = (1, lookahead + 1) if self.kind.is_parallel else (lookahead, 1)
        return steps * max(1e-6, self._draft_line(self.durations.step[mode])(self.live * tokens)) if lookahead else 0.0

    def _draft_line(self, line: Line) -> Line:
        """Returns the line, or until it has a measurement that of a draft in turn, which may have more cores."""
        return line if line.count else self.durations.step[IN_TURN]

    def seconds_of_a_pass(self, lookahead: int, budget: int) -> float:
        tokens = (lookahead + 1) * (budget + 1) if self.kind.is_parallel else budget
        return max(1e-6, self._draft_line(self.durations.branches)(self.live * tokens))

    def seconds_to_prepare(self, lookahead: int, budget: int) -> float:
        passes, feeding = 1, 0.0
        if not self.kind.is_parallel:  # a parallel draft reads the speculation in the pass of its branches
            passes, feeding = lookahead, self._draft_line(self.durations.branches)(self.live * (lookahead + 1))
        return self.durations.choosing.value + feeding + passes * self.seconds_of_a_pass(lookahead, budget)

    @property
    def contention(self) -> float:
        """Factor by which a verification takes longer while the draft is working; 1 if unknown."""
        alone, beside = self.durations.verification[IN_TURN], self.durations.verification[AHEAD]
        return beside(alone.units.value) / alone.seconds.value if min(alone.count, beside.count) >= 2 else 1.0

    def plain(self, early: int = 0) -> float:
        """Returns tokens per second of plain decoding, or of verifying early tokens in the rows that have some."""
        share, tokens = self._gain(self.rates.alone, early)
        return self._speed(tokens, self._seconds_to_verify_some(PLAIN, 0, early, share), 0.0)

    def in_turn(self, lookahead: int, early: int = 0) -> float:
        """Returns tokens per second of drafting so many tokens after each outcome, in the rows without early tokens."""
        share, tokens = self._gain(self.rates.beside, early, lookahead)
        drafting = (1 - share**self.live) * self.seconds_to_draft(IN_TURN, lookahead)
        drafting += self.durations.unexplained[IN_TURN](0)
        return self._speed(tokens, self._seconds_to_verify_some(IN_TURN, lookahead, early, share), drafting)

    def _speed(self, tokens: float, verifying: float, drafting: float) -> float:
        """Returns tokens per second of all rows, from the tokens of a row and the seconds of the parts of a round."""
        return self.live * theory.speculative_decoding_speedup(tokens, drafting / verifying) / verifying

    def may_reach(self, speed: float) -> bool:
        """Whether SSD would exceed this number of tokens per second with a draft that took no time (Corollary 9)."""
        longest = self.tokens(LOOKAHEADS[-1])[-1]
        return self.plain() * theory.ssd_over_speculative_decoding_bound(0.0, longest, expected_sd=1.0) > speed

    def best_after_miss(self, lookahead: int) -> int:
        """Returns how many tokens, up to `lookahead`, are worth drafting just in time; all if the settings fix it."""
        if self.kind.config.lookahead != "auto":
            return lookahead
        parts = [(n, self.seconds_to_verify(AHEAD, k), self.seconds_to_draft(AHEAD, k))
                 for k, n in enumerate(self.tokens(lookahead))]  # fmt: skip
        return max(range(lookahead + 1), key=lambda k: self._speed(*parts[k]))

    def ahead(self, lookahead: int, budgets, counts=(0,)) -> dict[tuple, float]:
        """Returns tokens per second of drafting ahead by mode, lookahead, budget and most early tokens."""
        verify, missed = self.seconds_to_verify(AHEAD, lookahead), self.best_after_miss(lookahead)
        unit, rounds, speeds = self.seconds_to_verify(AHEAD, 0), {}, {}  # the unit of time in Corollary 16
        for count in counts:
            (share, _), gains = zip(*(self._gain(self.rates.beside, count, k) for k in (lookahead, missed)))
            hit, miss = (self._seconds_to_verify_some(AHEAD, k, count, share) for k in (lookahead, missed))
            rounds[count] = share, gains, hit, miss + self.seconds_to_draft(AHEAD, missed)
        for budget, hit_rate in zip(budgets, self.hit_rate(lookahead, budgets)):
            late = max(0.0, self.seconds_to_prepare(lookahead, budget) - verify)
            if speeds and late > self.seconds_of_a_pass(lookahead, budget):
                continue  # the last pass could not begin before the outcome comes, so branches would stay shorter
            late += self.durations.unexplained[AHEAD](budget)
            for count, (share, gains, hit, miss) in rounds.items():
                # A single row that misses, and has no early tokens, makes all rows wait and cuts their speculations.
                all_hit = min(1.0, (share + (1 - share) * hit_rate) ** self.live)
                backup = max(0.0, (miss + late) / unit - 1)
                speedup = theory.ssd_speedup(all_hit, *gains, primary_time=(hit + late) / unit, backup_time=backup)
                speeds[AHEAD, lookahead, budget, count] = self.live * speedup / unit
        return speeds

    def reason(self, chosen: tuple[str, int, int, int], speeds: dict[tuple, float]) -> str:
        """Returns why a plan (mode, lookahead, budget, most early tokens) is the best of all, with its numbers."""
        mode, lookahead, budget, early = chosen
        rates = self.rates.alone if mode == PLAIN else self.rates.beside
        repeats = f"where the text repeats itself ({rates.share.value:.2f} of the rounds)"
        by_early = f"{EARLY_TITLE} of up to {early} tokens {repeats}"
        if mode == PLAIN and early:
            return f"not drafting, but {by_early}"
        also = f", and {by_early}" if early else ""
        if mode == AHEAD:
            verify, prepare = self.seconds_to_verify(AHEAD, lookahead), self.seconds_to_prepare(lookahead, budget)
            reason = (
                f"preparing takes {1e3 * prepare:.1f} ms against {1e3 * verify:.1f} ms per verification, expected hit "
                f"rate {self.hit_rate(lookahead, [budget])[0]:.2f}: lookahead {lookahead}, budget {budget}"
            )
            if 2 * budget > self.most_states // lookahead:  # a larger budget may not fit
                reason += f" (its memory has room for {self.most_states} recurrent states of a row)"
            return reason + also
        if mode == IN_TURN:
            draft, verify = self.seconds_to_draft(IN_TURN, lookahead), self.seconds_to_verify(IN_TURN, lookahead)
            return (
                f"drafting takes {1e3 * draft:.1f} ms and verification {1e3 * verify:.1f} ms: drafting in turn, "
                f"lookahead {lookahead}{also}"
            )
        gain = max((speed for plan, speed in speeds.items() if plan[0] != PLAIN), default=0.0) / speeds[chosen]
        expected = f": expected {gain:.2f} times plain decoding's speed" if gain else ""
        yet = " yet" if gain > 1 else ""  # a plan that was not tried, or hardly a gain
        return f"not drafting{yet}{expected} (estimated acceptance {self.acceptance(1)[0]:.2f})"


class NoDraftCosts(CostModel):
    """Estimates the speed of early tokens without a draft, where rounds of any mode tell what a verification takes."""

    seen_anyway = (PLAIN,)

    def knows(self, mode: str) -> bool:
        return super().knows(PLAIN)

    def in_turn(self, lookahead: int, early: int = 0) -> float:
        """Returns tokens per second of verifying up to `lookahead` early tokens of each row that has some."""
        return self.plain(lookahead)
