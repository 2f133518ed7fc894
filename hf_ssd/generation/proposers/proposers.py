"""All who propose in the target's process in a call, and how their tokens join those of the draft."""

import dataclasses
import time
from collections.abc import Callable

import torch

from ...distributed.sessions import SessionRequest
from ...rounds import MTP, NGRAM, NOTHING, PLAIN, Plan, RoundRecord, Speculation, padded
from . import PROPOSERS
from .base import Proposer, Texts, joined
from .ngrams import Ngrams

FIRST_COMPARED = 8  # first rounds, each of which evaluates n-grams though none is verified
ROUNDS_PER_COMPARISON = 4  # later, one of so many rounds does


class Proposers:
    """
    N-grams come first: they leave with the outcome, and the tokens that they would have given are counted. A fallback
    is asked where the draft's answer has no tokens for a row.
    """

    def __init__(self, request: SessionRequest, texts: list[list[int]]):
        self.request, self.texts, config = request, texts, request.config
        self.has_no_draft = config.drafter == "ngram"
        self.counts_ngrams = config.fallback == config.lookahead == "auto" and not self.has_no_draft
        self.ngrams: Ngrams | None = None
        self.counted: tuple[list[int], list[int]] = [], []  # see `ngram_tokens` and `ngram_matched` of [`RoundRecord`]
        self.proposed: list[list[int]] = []  # the n-gram of each row that is verified next, if any is asked for
        self.searching = 0.0, 0.0  # when the search for n-grams began, and its seconds
        self.fallbacks: dict[str, Proposer] = {}  # those that were asked, and one that follows the text
        self.tensor: Texts | None = None  # the texts, once a fallback was asked
        self.plan, self.live = Plan(PLAIN), [True] * len(request.prompts)
        self.drafted: list[int] = []  # how many of the tokens of each row are the draft's
        self.missed: tuple[list[int], Speculation | None] = [], None  # the fallback's rows and its answer

    def begin(self) -> None:
        """Reads the prompts."""
        if self.ngrams is None:
            self.ngrams = Ngrams(self.texts)

    def begin_session(self, request: Callable[[], SessionRequest]) -> None:
        """A draft reads the rows of the request, and so does a fallback that follows the text from here on."""
        self.fallbacks = {MTP: PROPOSERS[MTP](request())} if self.request.head is not None else {}

    # ---------------------------------------------------------------- n-grams

    def take_in(self, new: list[list[int]], plan: Plan, is_beside: bool) -> list[list[int]]:
        """
        Counts how many of the `new` tokens, none of a finished row, the last n-grams gave or would have given, and
        returns n-grams to verify if the next plan asks for them. `is_beside` says that a draft is asked for the other
        rows.
        """
        self.plan, self.live, self.is_beside = plan, [bool(tokens) for tokens in new], is_beside
        start, most = time.perf_counter(), plan.lookahead if self.has_no_draft else plan.ngrams
        if self.counts_ngrams:
            matched, gave = self.ngrams.matched, self.ngrams.compare(new)
            self.counted = (gave, matched) if max(gave) >= 0 else ([], [])
        self.proposed = self._search(most) if most else []
        self.searching = start, time.perf_counter() - start
        return self.proposed

    def compare(self, number: int) -> None:
        """Looks for n-grams, if they are due in this round, only to compare them with the tokens to come."""
        is_due = number < FIRST_COMPARED or number % ROUNDS_PER_COMPARISON == 0
        if is_due and not self.proposed:
            self._search(0)

    def _search(self, most: int) -> list[list[int]]:
        return self.ngrams.propose([not goes_on for goes_on in self.live], most, alone=not self.is_beside)

    def without_draft(self) -> Speculation:
        """Returns the speculation of a round in which no draft answers: n-grams, or nothing."""
        self.drafted, self.missed = [], ([], None)
        if not self.proposed:
            return Speculation.empty(len(self.live))
        record = RoundRecord(PLAIN, ngrams=self.plan.ngrams)
        if self.has_no_draft:
            answered_at, seconds = self.searching
            record = RoundRecord(self.plan.mode, answered_at=answered_at, answer_seconds=seconds)
        record.sources = [NGRAM if ngram else NOTHING for ngram in self.proposed]
        record.lengths, record.lookahead = list(map(len, self.proposed)), max(map(len, self.proposed))
        return Speculation(padded(self.proposed, record.lookahead), None, record)

    # ---------------------------------------------------------------- beside a draft

    def after_answer(self, answer: Speculation) -> tuple[Speculation, bool]:
        """
        Returns the draft's answer with the tokens of this process, padded to one width, and whether the draft is to be
        told because rows have missed.
        """
        tokens, sources = [list(of_row) for of_row in answer.tokens], list(answer.record.sources)
        self.drafted, self.missed = list(map(len, tokens)), ([], None)
        for row, ngram in enumerate(self.proposed):
            if ngram:
                tokens[row], sources[row], self.drafted[row] = ngram, NGRAM, 0
        missed = [row for row, goes_on in enumerate(self.live) if goes_on and sources[row] == NOTHING]
        if missed:
            self.missed = missed, self._ask(self.plan.fallback, missed)
            for row, of_row in zip(missed, self.missed[1].tokens):
                tokens[row], sources[row] = of_row, self.plan.fallback
        width = max(map(len, tokens))
        lengths = [len(of_row) if goes_on else width for of_row, goes_on in zip(tokens, self.live)]
        if min(lengths) < width:
            tokens = padded(tokens, width)
        else:
            lengths = []
            tokens = [of_row or [0] * width for of_row in tokens]  # finished rows
        for proposer in self.fallbacks.values():
            proposer.take_speculation(tokens, sources)
        record = dataclasses.replace(answer.record, sources=sources, lengths=lengths, lookahead=width)
        record.ngrams = self.plan.ngrams
        return Speculation(tokens, None, record), bool(missed)

    @property
    def are_certain(self) -> bool:
        """Whether no token of the last speculation was drawn from a distribution."""
        proposal = self.missed[1]
        return not any(self.drafted) and (proposal is None or proposal.probabilities is None)

    def _ask(self, name: str, missed: list[int]) -> Speculation:
        if name not in self.fallbacks:
            self.fallbacks[name] = PROPOSERS[name](self.request)
        if self.tensor is None:
            self.tensor = Texts(self.texts)
        self.tensor.read(self.texts)
        return self.fallbacks[name].propose(self.tensor.ids, self.tensor.lengths, missed, self.plan.lookahead)

    def distributions(
        self, tokens: list[list[int]], q: torch.FloatTensor | None, device: torch.device
    ) -> torch.FloatTensor:
        """Returns the distributions `(batch_size, width, vocab_size)` that the last tokens were drawn from."""
        width = len(tokens[0])
        if q is not None and all(n == width or not goes_on for n, goes_on in zip(self.drafted, self.live)):
            return q
        return joined(tokens, self.request.vocab_size, device, self.drafted, q, *self.missed)
