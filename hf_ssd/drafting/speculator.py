"""The draft's work in a call of generate(), without any communication: prepare, look up, complete."""

import dataclasses
import time
from collections.abc import Iterator

import torch
from transformers import GenerationConfig

from ..cache.kept_prefixes import common
from ..rounds import (
    BY_TARGET,
    CUSTOM,
    EARLY,
    FINISHED,
    NOTHING,
    PLAIN,
    PREPARED,
    PRIMARY,
    Outcome,
    Plan,
    RoundRecord,
    Speculation,
    padded,
    since,
)
from .cache_shapes import CANDIDATES, CacheShape
from .drafter import Drafter
from .outcome_candidates import UNUSED
from .request import SessionRequest
from .siblings import best
from .speculation_cache import SpeculationCache

BETWEEN_LOOKS = 2e-5  # seconds


class Speculator:
    """Drafts for a batch of rows, ahead of time ([`~Speculator.prepare`]) and just in time ([`~Speculator.answer`])."""

    def __init__(self, drafter: Drafter, shape: CacheShape, request: SessionRequest):
        self.drafter, self.shape = drafter, shape
        self.limit = request.generation_config.max_length  # tokens that a row may have
        # The budgets of workers are added up, and each worker prepares its share of the outcomes.
        self.worker_index, self.num_workers = request.worker_index, request.num_workers
        self.plan, rows = Plan(PLAIN), len(drafter.prefix.lengths)
        self.finished = [False] * rows
        self.verified: list[list[int]] = [[] for _ in range(rows)]  # the tokens that are being verified
        self.sources = [PREPARED] * rows  # where these come from
        self.siblings: list[list[tuple[int, int]]] = [[] for _ in range(rows)]  # that are verified beside them
        self.next_siblings: list[list[tuple[int, int]]] | None = None  # those of the last answer
        self.prepared: SpeculationCache | None = None
        self.found_in: tuple[SpeculationCache | None, list[int]] = None, []  # where the last outcome was looked up
        self.proposed: list[list[int]] = [[] for _ in range(rows)]  # of each row, by the target's process
        self.waits = False  # for the tokens of rows that have missed
        self.uncommitted: tuple | None = None  # the last outcome, until the drafter has taken it in
        self.unwritten: list[list[int]] | None = None  # the tokens that are verified next, until it has written them
        self.joining: list[tuple] = []  # tokens of rows that join with the next outcome
        self.joined: list[tuple] = []  # and with the last one, which are read before the next preparation
        self.lessons: list[tuple] = []  # candidates, accepted counts and bonus tokens of rounds not learned from yet

    def join(self, row: int, start: int, tokens: list[int], options: GenerationConfig | None, seed: int) -> None:
        """Takes in the next tokens of a row that joins. Its settings come with the last tokens."""
        self.joining.append((row, start, tokens, options, seed))

    # ---------------------------------------------------------------- ahead of time

    def prepare(self, plan: Plan) -> None:
        for _ in self.passes(plan):
            pass

    def stop(self, passes: Iterator[None]) -> None:
        """Ends a preparation before its last pass, because its outcome has come."""
        if self.drafter.reads_target:  # where a branch is cut must not depend on time if it would go on in another way
            for _ in passes:
                pass
        passes.close()

    def passes(self, plan: Plan) -> Iterator[None]:
        """Prepares the next speculation. Yields when the outcomes are chosen, and after each pass of their branches."""
        start, self.plan = time.perf_counter(), plan
        self.catch_up()
        self._read_joining()
        # The shape has learned from all rounds but the last at each choice, whether there was time to spare or not.
        self._learn(keep=1)
        growing = iter(())
        if plan.budget and self.drafter.prefix.rows:
            # 1. Choose the outcomes.
            cache = self.prepared = self._choose(plan)
            record = cache.record
            record.prepared_at, record.choose_seconds = start, since(start)
            growing = self.drafter.grow(cache.accepted, cache.bonus, plan)

        # 2. Grow all branches together, pass by pass.
        start = time.perf_counter()
        yield
        for grown in growing:
            if grown is None:
                time.sleep(BETWEEN_LOOKS)
            else:
                cache.append(*grown)
                record.passes += 1
            record.grow_seconds = since(start)
            yield
        self._learn()

    def _read_joining(self) -> None:
        for row, start, tokens, options, seed in self.joined:
            self.drafter.read(row, start, tokens, options, seed)
            if options is not None:  # the target verifies the padding of this row's speculation
                self.finished[row], self.sources[row] = False, CUSTOM
                self.drafter.take_speculation(self.verified)
        self.joined.clear()

    def _choose(self, plan: Plan) -> SpeculationCache:
        """Returns the outcomes to prepare: as many as the plan says, if there is memory for their states."""
        prefix, states, budget = self.drafter.prefix, self.drafter.prefix.most_states, plan.budget
        if states:
            budget = min(budget, max(1, states // plan.lookahead))
        from_fallback, of_all = [source in BY_TARGET for source in self.sources], budget * self.num_workers
        candidates = self.drafter.candidates(from_fallback, max(of_all, CANDIDATES))
        fan_outs, fewest = self.shape.fan_outs(candidates, of_all), prefix.decoder.fewest_tokens
        accepted, bonus = candidates.outcomes(fan_outs, self.worker_index, self.num_workers, fewest)
        for row in {*range(len(accepted))} - {*prefix.rows}:  # finished, or read once features of its text have come
            accepted[row] = [UNUSED] * len(accepted[row])
        return SpeculationCache(accepted, bonus, candidates, RoundRecord(budget=budget))

    # ---------------------------------------------------------------- the answer

    def answer(self, outcome: Outcome, plan: Plan) -> Speculation:
        speculation = self.complete(self.look_up(outcome, plan))
        speculation.probabilities = self.distributions(speculation)
        return speculation

    def look_up(self, outcome: Outcome, plan: Plan) -> Speculation:
        """Returns the tokens that were prepared for an outcome, without waiting for the device."""
        self.catch_up()  # takes in the previous round, if no preparation has done so
        start, self.plan, cache, self.prepared = time.perf_counter(), plan, self.prepared, None
        self.joined, self.joining = self.joined + self.joining, []
        self.finished, self.waits = [not tokens for tokens in outcome.tokens], False
        self.proposed = outcome.proposed or [[] for _ in outcome.tokens]
        # Of each row's new tokens, how many before the last one were being verified.
        rows = zip(outcome.tokens, self.verified)
        counts = [common(of_row[:-1], own) if of_row else FINISHED for of_row, own in rows]
        bonus = [of_row[k] if of_row else 0 for of_row, k in zip(outcome.tokens, counts)]
        # A row that has accepted a sibling has a token behind the bonus token that a chain would have given it.
        turned = [
            len(of_row) == k + 2 and (k, of_row[k]) in own
            for of_row, k, own in zip(outcome.tokens, counts, self.siblings)
        ]
        lengths = [n for n, finished in zip(self.drafter.prefix.lengths, self.finished) if not finished]
        drafted = self.drafter.drafted.shape[1]
        is_cut = self.limit is not None and min(lengths, default=0) + drafted >= self.limit
        if cache is not None and not is_cut:  # the target cuts a speculation near the limit
            self.lessons.append((cache.candidates, counts, bonus))
        if [k + has_turned for k, has_turned in zip(counts, turned)] != outcome.accepted:
            cache = None  # there are tokens of later rounds, in which the draft was not asked
        branches = [-1] * len(counts)
        record = RoundRecord(ranks=branches) if cache is None else cache.record
        found = Speculation([[] for _ in counts], None, record)
        if cache is not None:
            record.grown, record.ranks = len(cache.tokens[0][0]), cache.candidates.ranks(counts, bonus)
            branches = [-1 if own else branch for own, branch in zip(self.proposed, cache.lookup(counts, bonus))]
            for row in [row for row, has_turned in enumerate(turned) if has_turned and branches[row] >= 0]:
                if not cache.go_on(row, branches[row], outcome.tokens[row][-1]):
                    branches[row] = -1
            found.tokens, found.beside = cache.of(branches)
            found.support = max(1, cache.support(branches)) if cache.supports else self.drafter.vocab_size
        record.sources = [NOTHING if branch < 0 else PREPARED for branch in branches]
        record.mode, record.states, record.answered_at = plan.mode, self.drafter.prefix.most_states, start
        adopted = [-1 if has_turned else branch for branch, has_turned in zip(branches, turned)]
        self.uncommitted, self.found_in = (counts, outcome, adopted), (cache, branches)
        record.answer_seconds = since(start)
        return found

    def complete(self, found: Speculation, width: int | None = None) -> Speculation:
        """Returns the answer, of `width` tokens if that is settled, after drafting those that are missing."""
        start, plan, record = time.perf_counter(), self.plan, found.record
        drafted = [row for row, ends in enumerate(self.finished) if not ends and not self.proposed[row]]
        missed = [row for row in drafted if record.sources[row] == NOTHING]
        # If nothing was prepared, the draft model proposes the tokens, as in speculative decoding.
        self.waits = bool(missed) and self.found_in[0] is not None and plan.fallback != PRIMARY
        if self.waits:
            drafted = [row for row in drafted if row not in missed]
        known = [len(found.tokens[row]) for row in drafted]
        if width is None:
            width = answer_width(plan, known) if drafted else 0
        ready = padded(self.proposed, width)  # in rows that the draft leaves alone
        for row in drafted:
            ready[row] = found.tokens[row][:width]
        found, record.steps, record.lookahead = dataclasses.replace(found, tokens=ready), 0, width
        lacks_tokens = min(known, default=width) < width
        if lacks_tokens:
            self.catch_up()
            found.probabilities = self.distributions(found)
            found, record.steps = self.drafter.complete(found, width, plan)
        written = found.tokens
        found.tokens = [tokens if row in drafted else [] for row, tokens in enumerate(written)]
        if width and plan.nodes > width:
            others = found.beside or [[]] * len(written)
            count = plan.nodes - width
            of_rows = [best(of_row[:width], count) if row in drafted else [] for row, of_row in enumerate(others)]
            found.siblings = of_rows if any(of_rows) else None
        self.next_siblings = found.siblings
        for row, source in enumerate(record.sources):
            if source == NOTHING and not self.proposed[row] and not (self.waits and row in missed):
                record.sources[row] = PRIMARY
        if not self.waits:
            tokens = [own or of_row for own, of_row in zip(self.proposed, found.tokens)]
            sources = [EARLY if own else source for own, source in zip(self.proposed, record.sources)]
            self.take_speculation(tokens, sources)
            if lacks_tokens and self.verified == written:  # the drafter has taken them in
                self.unwritten = None
        record.answer_seconds += since(start)
        return found

    def distributions(self, speculation: Speculation) -> torch.FloatTensor | None:
        """Returns the distributions `(batch_size, tokens, vocab_size)` of the answer's tokens."""
        cache, branches = self.found_in
        if speculation.probabilities is not None:
            return speculation.probabilities
        return None if cache is None else cache.distributions(branches, speculation.width)

    def take_speculation(self, tokens: list[list[int]], sources: list[str]) -> None:
        """Makes these tokens of each row the speculation that is verified next, with its sources."""
        self.sources, self.verified = sources, padded(tokens, max(map(len, tokens)))
        self.unwritten, self.siblings = self.verified, self.next_siblings or [[] for _ in tokens]

    def catch_up(self) -> None:
        """Lets the drafter take in the last outcome and the tokens that are verified next, unless it already has."""
        if self.uncommitted is not None:
            (counts, outcome, branches), self.uncommitted = self.uncommitted, None
            self.drafter.commit(counts, outcome.tokens, branches)
            self.drafter.prefix.read_target(outcome)
        if self.unwritten is not None:
            if self.waits:  # the drafter may have drafted for other rows, with tokens in the place of these
                self.drafter.forget_speculation()
            self.drafter.take_speculation(self.unwritten)
            self.unwritten = None

    def end(self) -> None:
        """Ends the call: lets the cache shape learn from the remaining rounds."""
        self._learn()
        self.drafter.prefix.keep(range(len(self.finished)))

    def _learn(self, keep: int = 0) -> None:
        """Lets the cache shape learn from all rounds that it has not learned from, except the last `keep` rounds."""
        while len(self.lessons) > keep:
            self.shape.learn(*self.lessons.pop(0))


def answer_width(plan: Plan, known: list[int]) -> int:
    """Returns how many tokens the next speculation has: as many as all rows have, but at least `plan.after_miss`."""
    return min(plan.lookahead, max(plan.after_miss, min(known)))
