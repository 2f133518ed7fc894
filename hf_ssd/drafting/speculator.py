"""
The draft's work in one call of generate(), without any communication: prepare, look up, complete.

While the target verifies a speculation, a cache shape chooses likely outcomes of it (an accepted count and a bonus
token each) by the draft's own distributions along it, and the drafter grows the next speculation behind each of them.
When the outcome comes it is looked up among those, and what is missing is drafted just in time.
"""

import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np
import torch

from ..config import SSDConfig
from ..rounds import (
    AHEAD,
    FALLBACKS,
    FINISHED,
    NGRAM,
    NOTHING,
    PLAIN,
    PREPARED,
    PRIMARY,
    Outcome,
    Plan,
    RoundRecord,
    Speculation,
    since,
)
from .cache_shapes import CANDIDATES, CacheShape
from .drafter import Drafter
from .fallbacks import Fallback, fallbacks_for, join
from .outcome_candidates import OutcomeCandidates
from .speculation_cache import SpeculationCache

PROFILED_BUDGETS, PROFILED_PASSES = (8, 1, 16), 3  # the first pass of each size is not counted
ROUNDS_PER_COMPARISON = 4  # for one of which it is seen what the n-gram fallback would have given


class Speculator:
    """
    Drafts for a batch of rows: ahead of time for the likely outcomes ([`~Speculator.prepare`]), and just in time for
    the outcomes that were not prepared ([`~Speculator.answer`]).

    Args:
        drafter ([`Drafter`]): Proposes the tokens.
        config (`SSDConfig`): The user's settings.
        shape ([`CacheShape`]): Chooses outcomes, and learns from how rounds end.
        seed (`int`): Of the random fallback.
        limit (`int`, *optional*): Tokens that a row may have.
        custom ([`Fallback`], *optional*): The user's own fallback, which takes the place of the plan's.
        worker_index, num_workers (`int`, *optional*): Which of how many drafts this is. Each prepares its share of the
            outcomes of all their budgets together.
    """

    def __init__(
        self,
        drafter: Drafter,
        config: SSDConfig,
        shape: CacheShape,
        seed: int,
        limit: int | None = None,
        custom: tuple[str, Fallback] | None = None,
        worker_index: int = 0,
        num_workers: int = 1,
    ):
        self.drafter, self.config, self.shape, self.limit, self.custom = drafter, config, shape, limit, custom
        self.worker_index, self.num_workers = worker_index, num_workers
        self.fallbacks = fallbacks_for(drafter.vocab_size, seed)
        self.plan = Plan(PLAIN)
        self.sources = [PREPARED] * len(drafter.prefix.lengths)  # of the speculation that is being verified
        self.finished = [False] * len(drafter.prefix.lengths)
        self.candidates: OutcomeCandidates | None = None
        self.prepared: SpeculationCache | None = None
        self.was_prepared = False
        self.lessons: list[tuple] = []  # candidates, accepted counts and bonus tokens of rounds not learned from yet
        self.preparing = RoundRecord()  # what preparing took
        self.uncommitted: tuple | None = None  # what the drafter has not taken in: the last outcome,
        self.unwritten: list[list[int]] | None = None  # and the tokens that are verified next
        self.found_in: tuple[SpeculationCache | None, list[int]] = None, []  # where the last outcome was looked up
        self.compares_ngrams = config.fallback == "auto" and config.lookahead == "auto"
        self.rounds, self.ngram_matches = 0, [-1] * len(self.finished)
        self.uncompared: tuple | None = None  # verified lengths, accepted counts and sources of the round before

    def begin(self) -> None:
        """Reads the prompts, while the target does the same."""
        self.drafter.begin()

    def profile(self, outcome_arrived: Callable[[], bool] = lambda: False) -> tuple[float, float, float]:
        """
        Times passes of a few sizes behind the prompts, while the target decodes; of one size, if that takes so long
        that the outcome arrives.

        Returns:
            Seconds to choose outcomes, of a forward pass, and of each token in it.
        """
        rows, chosen, sizes, taken = len(self.finished), [], [], []
        for budget in PROFILED_BUDGETS:
            if taken and outcome_arrived():
                break
            plan = Plan(AHEAD, PROFILED_PASSES, PROFILED_PASSES, budget)
            start = time.perf_counter()
            accepted, bonus = self._choose(plan)
            chosen.append(since(start))
            start, seconds = time.perf_counter(), []
            while len(seconds) < PROFILED_PASSES:
                for _ in self.drafter.grow(accepted, bonus, plan):
                    seconds.append(since(start))
                    start = time.perf_counter()
            sizes.append(rows * self.drafter.tokens_of_a_pass(PROFILED_PASSES, len(accepted[0])))
            taken.append(min(seconds[1:]))
        slope, fixed = np.polyfit(sizes, taken, 1) if len(set(sizes)) > 1 else (0.0, taken[0])
        if slope < 0 or fixed < 0:
            slope, fixed = 0.0, float(np.median(taken))
        self.candidates = None
        return min(chosen), float(fixed), float(slope)

    # ---------------------------------------------------------------- ahead of time

    def prepare(self, plan: Plan, outcome_arrived: Callable[[], bool] = lambda: False) -> None:
        """
        Drafts the next speculation for the likely outcomes of the one that is being verified.

        Args:
            plan ([`~hf_ssd.rounds.Plan`]): What to prepare.
            outcome_arrived (`Callable[[], bool]`): Whether the outcome is there. Then the branches stay as they are.
        """
        start, self.plan, self.preparing = time.perf_counter(), plan, RoundRecord()
        self.catch_up()
        self._learn(keep=1)  # so the shape learns from each round one round late, whether there was time or not
        if plan.budget:
            # 1. Choose the outcomes.
            accepted, bonus = self._choose(plan)
            self.prepared = SpeculationCache(accepted, bonus)
            self.preparing.prepared_at, self.preparing.choose_seconds = start, since(start)
            self.preparing.budget = plan.budget

            # 2. Grow all branches together, one token of each per forward pass.
            start, growing = time.perf_counter(), self.drafter.grow(accepted, bonus, plan)
            while not outcome_arrived() and (grown := next(growing, None)) is not None:
                self.prepared.append(*grown)
                self.preparing.passes += 1
            self.preparing.grow_seconds = since(start)
        if not outcome_arrived():
            self._learn()
            self._compare_ngrams()

    def _choose(self, plan: Plan) -> tuple[list[list[int]], list[list[int]]]:
        """Returns the outcomes to prepare. See [`OutcomeCandidates.outcomes`]."""
        budget = plan.budget * self.num_workers
        from_fallback = [source in FALLBACKS for source in self.sources]
        self.candidates = self.drafter.candidates(from_fallback, max(budget, CANDIDATES), plan)
        fan_outs = self.shape.fan_outs(self.candidates, budget)
        fewest = self.drafter.prefix.decoder.fewest_tokens
        return self.candidates.outcomes(fan_outs, self.worker_index, self.num_workers, fewest)

    # ---------------------------------------------------------------- the answer

    def answer(self, outcome: Outcome, plan: Plan) -> Speculation:
        """Returns the next speculation of each row."""
        speculation = self.complete(self.look_up(outcome, plan))
        speculation.probabilities = self.distributions(speculation)
        return speculation

    def look_up(self, outcome: Outcome, plan: Plan) -> Speculation:
        """
        Returns what was prepared for an outcome, with the draft's part of the record. Nothing is asked of the device:
        the tokens are on the host, and the outcome is taken in later. What is verified next is then settled by
        [`~Speculator.complete`], or by [`~Speculator.verify`] if something else did it.

        Args:
            outcome ([`~hf_ssd.rounds.Outcome`]): How many tokens of the last speculation each row accepted, and the
                tokens that follow them. Nothing was prepared for tokens of later rounds.
            plan ([`~hf_ssd.rounds.Plan`]): What to answer, and what to prepare next.
        """
        self.catch_up()  # with the round before, where nothing was prepared since
        start, self.plan, self.rounds = time.perf_counter(), plan, self.rounds + 1
        counts, tokens = outcome.accepted, outcome.bonus
        self.finished = [k == FINISHED for k in counts]
        is_latest = outcome.later is None
        cache, preparing = (self.prepared, self.preparing) if is_latest else (None, RoundRecord())
        branches = [-1] * len(counts) if cache is None else cache.lookup(counts, tokens)
        found = Speculation.empty(len(counts))
        if cache is not None:
            found.tokens = [[] if branch < 0 else of_row[branch] for of_row, branch in zip(cache.tokens, branches)]
            found.support = cache.support(branches) if cache.supports else self.drafter.vocab_size
        record = found.record
        record.sources = [NOTHING if branch < 0 else PREPARED for branch in branches]
        record.mode, record.budget, record.passes = plan.mode, preparing.budget, preparing.passes
        record.grown = cache.grown if cache is not None else 0
        record.choose_seconds, record.grow_seconds = preparing.choose_seconds, preparing.grow_seconds
        record.prepared_at, record.answered_at = preparing.prepared_at, start
        record.ngram_matches, self.ngram_matches = self.ngram_matches, [-1] * len(counts)
        self.uncompared = list(self.drafter.prefix.lengths), counts, self.sources
        record.ranks = [-1] * len(counts)
        if self.candidates is not None and is_latest:
            record.ranks = self.candidates.ranks(counts, tokens)
        drafted = self.drafter.drafted.shape[1]
        lengths = [n for n, finished in zip(self.drafter.prefix.lengths, self.finished) if not finished]
        is_cut = self.limit is not None and min(lengths, default=0) + drafted >= self.limit
        if self.candidates is not None and not is_cut:  # the target cuts a speculation near the limit
            self.lessons.append((self.candidates, counts, tokens))
        self.was_prepared = self.candidates is not None and is_latest
        self.uncommitted, self.found_in = (counts, tokens, branches, outcome.later), (cache, branches)
        self.candidates = self.prepared = None
        self.preparing = RoundRecord()
        record.answer_seconds = since(start)
        return found

    def complete(self, found: Speculation, width: int | None = None) -> Speculation:
        """
        Returns what is verified next, after drafting just in time what is missing. If nothing is, the device is not
        asked for anything.

        Args:
            found ([`~hf_ssd.rounds.Speculation`]): What is prepared, for a row any number of tokens.
            width (`int`, *optional*): Tokens of the result, if others have settled it and no fallback is to be asked.
        """
        start, plan, sources, source = time.perf_counter(), self.plan, found.record.sources, PRIMARY
        missed = [row for row, one in enumerate(sources) if one == NOTHING and not self.finished[row]]
        # If nothing was prepared the draft is asked, as in speculative decoding.
        if width is None and missed and self.was_prepared:
            source, fallback = self.custom or (plan.fallback, self.fallbacks.get(plan.fallback))
            if fallback is not None:
                self.catch_up()
                prefix, found.probabilities = self.drafter.prefix, self.distributions(found)
                proposal = fallback.propose(prefix.ids, prefix.lengths, missed, plan.lookahead)
                device = self.drafter.device if self.drafter.sampled else None
                found = join(found, missed, proposal, plan.lookahead, self.drafter.vocab_size, device)
                width = None if PREPARED in sources else found.width
        known = [math.inf if finished else len(tokens) for finished, tokens in zip(self.finished, found.tokens)]
        width, steps = answer_width(plan, known) if width is None else width, 0
        tokens = [[0] * width if finished else row[:width] for finished, row in zip(self.finished, found.tokens)]
        found, record = dataclasses.replace(found, tokens=tokens), found.record
        record.sources = self.sources = [source if one == NOTHING else one for one in sources]
        if min(known) < width:
            self.catch_up()
            found.probabilities = self.distributions(found)
            found, steps = self.drafter.complete(found, width, plan)
        else:
            self.verify(tokens, self.sources)
        record.steps, record.lookahead = steps, width
        record.answer_seconds += since(start)
        return found

    def distributions(self, speculation: Speculation) -> torch.FloatTensor | None:
        """Returns what the tokens of the answer were drawn from, `(batch_size, tokens, vocab_size)`."""
        cache, branches = self.found_in
        if speculation.probabilities is not None or cache is None:
            return speculation.probabilities
        return cache.distributions(branches, speculation.width)

    def verify(self, tokens: list[list[int]], sources: list[str]) -> None:
        """Moves on to verify these tokens, `lookahead` of each row, with these sources of the rows."""
        self.sources, self.unwritten = sources, tokens

    def catch_up(self) -> None:
        """Lets the drafter take in the last outcome, and what is verified next, where it has not."""
        if self.uncommitted is not None:
            self.drafter.commit(*self.uncommitted)
        if self.unwritten is not None:
            self.drafter.verify(self.unwritten)
        self.uncommitted = self.unwritten = None

    # ---------------------------------------------------------------- learning

    def end(self) -> None:
        """The call is over: lets the cache shape learn what there was no time for."""
        self._learn()

    def _learn(self, keep: int = 0) -> None:
        """Lets the cache shape learn from all rounds but the last `keep`."""
        while len(self.lessons) > keep:
            self.shape.learn(*self.lessons.pop(0))

    def _compare_ngrams(self) -> None:
        """
        Sees in some rounds how many of the tokens that a row gained, the bonus token included, n-grams would have got
        right, for the next record.
        """
        if not self.compares_ngrams or self.uncompared is None or self.rounds % ROUNDS_PER_COMPARISON:
            return
        (lengths, accepted, sources), self.uncompared = self.uncompared, None
        rows = [row for row, k in enumerate(accepted) if k != FINISHED and sources[row] == PRIMARY]
        if rows:
            ids = self.drafter.prefix.ids
            proposal = self.fallbacks[NGRAM].propose(ids, lengths, rows, max(accepted) + 1)
            for tokens, row in zip(proposal.tokens, rows):
                gained = ids[row, lengths[row] : lengths[row] + accepted[row] + 1].tolist()
                self.ngram_matches[row] = ([a == b for a, b in zip(tokens, gained)] + [False]).index(False)


def answer_width(plan: Plan, known: list[float]) -> int:
    """
    Returns how many tokens the next speculation has: the planned ones if all rows have them, otherwise what all have,
    or at least what is worth drafting just in time.
    """
    return int(min(plan.lookahead, max(plan.after_miss, min(known))))
