"""Expected tokens and seconds of a round of each plan (Theorem 7 and Corollary 16 with measured parts)."""

import math

import numpy as np

from ..config import SSDConfig
from ..drafting.ngrams import LEAST_MATCHED
from ..rounds import AHEAD, FALLBACKS, IN_TURN, PLAIN, RoundRecord
from .estimates import Average, Line, NgramRates
from .experience import Durations, Experience

LOOKAHEADS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)  # tokens
BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # outcomes of each row
PRIOR_TOKENS = 4.0  # drafted tokens that the config's acceptance rate counts like
TOKENS_KEPT = 24.0  # drafted tokens that the earlier texts count like, at most, when a call begins
ROWS_COMPARED = 10.0  # rows that were looked up, the prior included, before n-grams are planned
RARE = 0.02  # share of rows with an n-gram below which none is planned
MEMORY_FOR_Q = 2**29  # bytes for the distributions of prepared tokens


class CostModel:
    """
    Estimates the speed of each plan in a call. Durations follow the measured rounds, those of each mode apart, because
    a mode has its own share of the cores; acceptance and hits are counted.

    Args:
        config (`SSDConfig`): Gives the priors and the cache shape.
        rows (`int`): Batch size.
        vocab_size (`int`): Vocabulary size of both models.
        sampled (`bool`): Whether the distributions of prepared tokens are kept.
        workers (`int`, *optional*, defaults to 1): Number of drafts, each of which prepares a whole budget.
        is_parallel (`bool`, *optional*): Whether a forward pass of the draft gives all tokens of its branches.
        durations ([`Durations`], *optional*), experience ([`Experience`], *optional*): Measurements of earlier calls.

    Attributes:
        seen_anyway (`tuple[str]`): Class attribute: the modes that need no probe, because rounds of other modes measure
            them too.
        live (`int`): Rows that are not finished.
        reading (`float`): Seconds that the last round waited while the draft read the text or the tokens of plain
            rounds, otherwise 0.
    """

    seen_anyway: tuple[str, ...] = ()

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
    ):
        self.config, self.rows, self.live, self.workers, self.reading = config, rows, rows, workers, 0.0
        self.is_parallel = is_parallel
        self.durations = Durations() if durations is None else durations
        self.experience = experience
        if experience is None:
            self.experience = Experience(config, max(LOOKAHEADS))
        self.accepted = [Average(0.0, 0.0) for _ in self.experience.accepted]
        self.alone, self.beside = NgramRates(), NgramRates()
        self.begin_call()
        self.most_states = 10**9  # of each row, each for a prepared token
        self.most_q = MEMORY_FOR_Q // (4 * rows * vocab_size) if sampled else 10**9  # prepared tokens of a row

    # ---------------------------------------------------------------- learning from rounds

    def knows(self, mode: str) -> bool:
        """Whether the durations of a round of this mode were measured."""
        costs = self.durations
        lines = {PLAIN: (), IN_TURN: (costs.step[IN_TURN],), AHEAD: (costs.branches, costs.verification[AHEAD])}[mode]
        return any(line.count for line in costs.verification.values()) and all(line.count for line in lines)

    def begin_call(self) -> None:
        """Starts a call: acceptance restarts from its long-run average, not from the end of the last text."""
        self.live = self.rows
        seen = self.experience
        averages = (*self.accepted, *self.alone.averages, *self.beside.averages)
        for now, ever in zip(averages, (*seen.accepted, *seen.alone.averages, *seen.beside.averages)):
            now.restart(ever.value, min(ever.weight, TOKENS_KEPT))

    def observe(self, before: RoundRecord, now: RoundRecord) -> None:
        """
        Learns from a round.

        Args:
            before ([`RoundRecord`]): The round before.
            now ([`RoundRecord`]): The round, complete. The draft's part of the record is about its answer to the
                outcome of `before`.
        """
        costs, seen = self.durations, self.experience
        costs.rounds, seen.rounds = costs.rounds + 1, seen.rounds + 1
        rows, lookahead, live = before.live, before.lookahead, len(before.live) or self.rows
        budget = now.budget // self.workers  # of each worker; the record has the sum over all workers
        self.live = len(now.live) or live
        if now.verify_seconds:  # a call's first round never comes as `now`: it is slow for reasons of its own
            costs.verification[now.mode].observe(self.live * (now.lookahead + 1), now.verify_seconds)
        if before.received_at:
            costs.seconds += now.received_at - before.received_at
            costs.tokens += sum(before.accepted[row] + 1 for row in rows) / max(1, len(rows))
        for row in now.live:
            accepted, source = now.accepted[row], now.sources[row]
            if source not in FALLBACKS:
                for place in range(min(accepted + 1, now.proposed(row), len(self.accepted))):
                    self.accepted[place].observe(place < accepted)
                    seen.accepted[place].observe(place < accepted)
        has_read = PLAIN in (before.mode, now.mode)  # then the draft has read the text, or the tokens of plain rounds
        self.reading = now.wait_seconds if has_read else 0.0
        self.most_states = now.states or self.most_states
        if now.ngram_tokens:
            self._observe_ngrams(before, now)
        if now.mode == PLAIN or not rows:
            return
        if now.passes:
            tokens = (now.grown + 1) * budget + lookahead + 1 if self.is_parallel else budget
            costs.branches.observe(live * tokens, now.grow_seconds / now.passes)
            feeding = costs.branches(live * (lookahead + 1)) if not self.is_parallel else 0.0
            costs.choosing.observe(max(0.0, now.choose_seconds - feeding))
        if now.steps and not has_read:
            tokens = max(now.proposed(row) for row in now.live) + 1 if self.is_parallel else 1
            costs.step[now.mode].observe(live * tokens, now.answer_seconds / now.steps)
        elapsed = now.received_at - before.received_at
        explained = max(before.verify_seconds, now.choose_seconds + now.grow_seconds) + now.answer_seconds
        if before.mode == now.mode and before.received_at:
            costs.unexplained[now.mode].observe(budget, max(0.0, elapsed - explained))
        if now.budget and now.ranks:
            drafted = [row for row in rows if before.sources[row] not in FALLBACKS]
            for row in drafted:
                self.experience.hit_rates.observe_rank(before.accepted[row] < before.proposed(row), now.ranks[row])
            asked = [row for row in drafted if not now.competes(row)]
            if asked:
                share = sum(now.hits[row] for row in asked) / len(asked)
                lookahead = max(before.proposed(row) for row in asked)
                self.experience.hit_rates.observe_hits(share, self.acceptance(lookahead), now.budget)

    def _observe_ngrams(self, before: RoundRecord, now: RoundRecord) -> None:
        """Learns how often rows have an n-gram, and how many of its tokens were right, verified or not."""
        for row in before.live:
            gained, given = before.accepted[row] + 1, now.ngram_tokens[row]
            beside = given if now.ngram_matched[row] >= LEAST_MATCHED else 0
            for known in (self, self.experience) if given >= 0 else ():
                known.alone.observe(given, gained)
                known.beside.observe(beside, gained)

    # ---------------------------------------------------------------- expectations

    def acceptance(self, lookahead: int) -> list[float]:
        """Returns the chance of each drafted token to be accepted if the tokens before it were."""
        return self._rates(self.accepted, lookahead)

    def _rates(self, averages: list[Average], count: int) -> list[float]:
        """Returns the first `count` rates of acceptance by place, where little was tested near the mean of all."""
        prior = self.config.acceptance_rate
        tested = math.fsum(average.weight for average in averages) + PRIOR_TOKENS
        mean = (math.fsum(average.total for average in averages) + PRIOR_TOKENS * prior) / tested
        rates = [(average.total + 2 * PRIOR_TOKENS * mean) / (average.weight + 2 * PRIOR_TOKENS)
                 for average in averages[:count]]  # fmt: skip
        return rates + [mean] * (count - len(rates))

    def tokens(self, lookahead: int) -> list[float]:
        """Returns the tokens that a row is expected to gain in a round with 0 to `lookahead` drafted tokens."""
        reached = np.cumprod(self.acceptance(lookahead))
        return [1.0, *(1.0 + np.cumsum(reached)).tolist()]

    def repeats(self, ngrams: NgramRates) -> bool:
        """Whether texts are known to repeat themselves so often that these n-grams may pay."""
        has_match = ngrams.places[0].weight > 0
        return has_match and self.experience.alone.matches.weight >= ROWS_COMPARED and ngrams.matches.value > RARE

    def _share(self, ngrams: NgramRates, lookup: int) -> tuple[float, float, float, float]:
        """Returns the share of rows that verify an n-gram, how often none and how often all do, and its tokens."""
        share = ngrams.matches.value if lookup else 0.0
        tokens = 1.0 + float(np.cumprod(self._rates(ngrams.places, lookup)).sum())
        return share, (1 - share) ** self.live, share**self.live if lookup else 0.0, tokens

    def seconds_to_verify(self, mode: str, lookahead: int) -> float:
        tokens, lines = self.live * (lookahead + 1), self.durations.verification
        known = [lines[mode]] if lines[mode].count else [line for line in lines.values() if line.count]
        return max(1e-6, min(line(tokens) for line in known)) if known else math.nan

    def seconds_to_draft(self, mode: str, lookahead: int) -> float:
        """Returns the seconds to draft `lookahead` tokens just in time, J in Corollary 16; almost none if unknown."""
        steps, tokens = (1, lookahead + 1) if self.is_parallel else (lookahead, 1)
        known = self._draft_line(self.durations.step[mode])
        return steps * max(1e-6, known(self.live * tokens)) if lookahead else 0.0

    def _draft_line(self, line: Line) -> Line:
        """Returns the line, or until it has a measurement that of a draft in turn, which may have more cores."""
        return line if line.count else self.durations.step[IN_TURN]

    def seconds_of_a_pass(self, lookahead: int, budget: int) -> float:
        tokens = (lookahead + 1) * (budget + 1) if self.is_parallel else budget
        return max(1e-6, self._draft_line(self.durations.branches)(self.live * tokens))

    def seconds_to_prepare(self, lookahead: int, budget: int) -> float:
        branches = self._draft_line(self.durations.branches)
        feeding = branches(self.live * (lookahead + 1)) if not self.is_parallel else 0.0
        passes = 1 if self.is_parallel else lookahead
        return self.durations.choosing.value + feeding + passes * self.seconds_of_a_pass(lookahead, budget)

    def largest_budget(self, lookahead: int) -> int:
        """Returns how many outcomes of each row fit the memory, at least 1."""
        return max(1, min(self.most_q, self.most_states) // max(1, lookahead))

    def plain(self, lookup: int = 0) -> float:
        """
        Returns tokens per second of plain decoding, all rows together, or of verifying up to `lookup` tokens of an
        n-gram in the rows that have one.
        """
        share, none, _, ngram = self._share(self.alone, lookup)
        seconds = none * self.seconds_to_verify(PLAIN, 0) + (1 - none) * self.seconds_to_verify(PLAIN, lookup)
        return self.live * (1 + share * (ngram - 1)) / seconds

    def in_turn(self, lookahead: int, lookup: int = 0) -> float:
        """
        Returns tokens per second of drafting `lookahead` tokens after each outcome, or of verifying up to `lookup`
        tokens of an n-gram in the rows that have one.
        """
        gain, seconds, every = self._verified_in_turn(lookahead, lookup)
        seconds += (1 - every) * self.seconds_to_draft(IN_TURN, lookahead)
        return self.live * gain / (seconds + self.durations.unexplained[IN_TURN](0))

    def _verified_in_turn(self, lookahead: int, lookup: int) -> tuple[float, float, float]:
        """Returns the tokens of a row, the seconds of the verification, and how often all rows have an n-gram."""
        share, none, every, ngram = self._share(self.beside, lookup)
        seconds = none * self.seconds_to_verify(IN_TURN, lookahead)
        seconds += (1 - none) * self.seconds_to_verify(IN_TURN, max(lookahead, lookup)) if lookup else 0.0
        return share * ngram + (1 - share) * self.tokens(lookahead)[-1], seconds, every

    def may_reach(self, speed: float) -> bool:
        """Whether drafting would exceed this number of tokens per second if it took no time, nor did drafted tokens."""
        return self.live * self.tokens(LOOKAHEADS[-1])[-1] / self.seconds_to_verify(PLAIN, 0) > speed

    def best_after_miss(self, lookahead: int) -> int:
        """Returns how many tokens, up to `lookahead`, are worth drafting just in time."""
        tokens = self.tokens(lookahead)
        speeds = [tokens[k] / self._after_a_miss(k) for k in range(lookahead + 1)]
        return max(range(lookahead + 1), key=speeds.__getitem__)

    def _after_a_miss(self, lookahead: int) -> float:
        return self.seconds_to_verify(AHEAD, lookahead) + self.seconds_to_draft(AHEAD, lookahead)

    def ahead(self, lookahead: int, budgets, after_miss: int | None = None, lookups=(0,)) -> dict[tuple, float]:
        """
        Returns tokens per second of drafting ahead by budget and lookup. A budget, except the first, is left out if its
        last pass could not begin before the outcome comes, because its branches would stay shorter.

        Args:
            lookahead (`int`): Tokens in each branch.
            budgets (`Iterable[int]`): Outcomes of each row.
            after_miss (`int`, *optional*): Tokens after a miss; the best number by default.
            lookups (`Iterable[int]`, *optional*): Most tokens of an n-gram, which the rows that have one verify
                instead; 0 without n-grams.
        """
        tokens, verify = self.tokens(lookahead), self.seconds_to_verify(AHEAD, lookahead)
        missed = self.best_after_miss(lookahead) if after_miss is None else after_miss
        after_a_miss, verify_missed, shares = self._after_a_miss(missed), self.seconds_to_verify(AHEAD, missed), {}
        for lookup in lookups:
            share, none, _, ngram = self._share(self.beside, lookup)
            wide = self.seconds_to_verify(AHEAD, max(lookahead, lookup))
            shares[lookup] = share, ngram, (1 - none) * (wide - verify), (1 - none) * (wide - verify_missed)
        prepared = [budget * self.workers for budget in budgets]
        speeds = {}
        for budget, hit_rate in zip(budgets, self.experience.hit_rates(self.acceptance(lookahead), prepared)):
            preparing = self.seconds_to_prepare(lookahead, budget)
            late = max(0.0, preparing - verify)
            if speeds and late > self.seconds_of_a_pass(lookahead, budget):
                continue
            late += self.durations.unexplained[AHEAD](budget)
            for lookup, (share, ngram, more_after_hit, more_after_a_miss) in shares.items():
                # A single row that misses, and has no n-gram, makes all rows wait.
                all_hit = (share + (1 - share) * hit_rate) ** self.live
                gain = all_hit * tokens[lookahead] + (1 - all_hit) * tokens[missed]
                gain = share * ngram + (1 - share) * gain
                seconds = all_hit * (verify + more_after_hit) + (1 - all_hit) * (after_a_miss + more_after_a_miss)
                speeds[budget, lookup] = self.live * gain / (seconds + late)
        return speeds

    @property
    def contention(self) -> float:
        """Factor by which a verification takes longer while the draft is working; 1 if unknown."""
        alone, beside = self.durations.verification[IN_TURN], self.durations.verification[AHEAD]
        tokens = alone.units.value
        return beside(tokens) / alone(tokens) if min(alone.count, beside.count) >= 2 else 1.0
