"""All who propose in the target's process in a call, and how their tokens join those of the draft."""

import dataclasses
from collections.abc import Callable

import torch

from ...devices import from_host
from ...drafting.request import SessionRequest
from ...rounds import AHEAD, EARLY, LONGEST_EARLY, NOTHING, PLAIN, Plan, Speculation, padded
from . import PROPOSERS
from .base import Proposal, Proposer

FIRST_COMPARED = 8  # first rounds, each of which evaluates early tokens though none is verified
ROUNDS_PER_COMPARISON = 4  # later, one of so many rounds does


class Proposers:
    """The early proposer, whose tokens leave with the outcome, or those that a grammar forces; and the fallbacks."""

    def __init__(self, request: SessionRequest, texts: list[list[int]]):
        self.request, self.texts = request, texts
        self.config = config = request.config
        self.early = PROPOSERS[EARLY](request)
        self.has_no_draft = config.drafter == EARLY
        self.counts_early = config.lookahead == "auto" and (self.has_no_draft or config.fallback == "auto")
        self.counted: tuple[list[int], list[int]] = [], []  # `early_alone` and `early_beside` of [`RoundRecord`]
        self.longest_forced = 0  # tokens of a row that a grammar forces
        self.proposed: list[list[int]] = []  # the early tokens of each row that are verified next, if any is asked for
        self.fallbacks: dict[str, Proposer] = {}  # those that were asked, and one that follows the text
        self.plan, self.live = Plan(PLAIN), [True] * len(request.prompts)
        self.drafted: list[int] = []  # how many of the tokens of each row are the draft's
        self.missed: dict[int, Proposal] = {}  # by row, what the fallback proposes
        self.joined: set[int] = set()  # rows that take part from this round on, for which the draft has nothing yet

    def begin_session(self, request: Callable[[], SessionRequest]) -> None:
        """A draft reads the rows of the request, and so does a fallback that follows the text from here on."""
        name = self.request.config.fallback
        self.fallbacks = {} if self.request.head is None else {name: PROPOSERS[name](request())}

    # ---------------------------------------------------------------- early tokens

    def take_in(self, new: list[list[int]], plan: Plan, is_beside: bool) -> list[list[int]]:
        """Counts what the last early tokens gave of the `new` ones. Returns those to verify, if the plan has any."""
        self.plan, self.is_beside = plan, is_beside
        self.live = [bool(tokens) or row in self.joined for row, tokens in enumerate(new)]
        most = plan.lookahead if self.has_no_draft else plan.early
        if self.counts_early:
            self.counted = self.early.compare(new)
        self.proposed = self._search(most) if most else []
        if self.request.forced is not None:
            self._put_forced(new)
        return self.proposed

    def _put_forced(self, new: list[list[int]]) -> None:
        """Lets tokens that a grammar forces take the place of other proposals: they are hardly ever rejected."""
        most = LONGEST_EARLY if self.config.lookahead == "auto" else self.config.lookahead
        forced = [self.request.forced(row, tokens)[:most] if tokens else [] for row, tokens in enumerate(new)]
        if any(forced):
            self.proposed = [own or early for own, early in zip(forced, self.proposed or [[]] * len(new))]
        self.longest_forced = max(map(len, forced))

    def compare(self, number: int) -> None:
        """Looks for early tokens, if they are due in this round, only to compare them with the tokens to come."""
        is_due = number < FIRST_COMPARED or number % ROUNDS_PER_COMPARISON == 0
        if is_due and not self.proposed:
            self._search(0)

    def _search(self, most: int) -> list[list[int]]:
        return self.early.first(self.texts, self.live, most, is_alone=not self.is_beside)

    # ---------------------------------------------------------------- all that is verified next

    def after_answer(self, answer: Speculation | None) -> tuple[Speculation, bool]:
        """Returns the draft's answer with the tokens of this process, and whether the draft is to be told of them."""
        found = Speculation.empty(len(self.live)) if answer is None else answer
        tokens, sources = list(found.tokens), list(found.record.sources)
        self.drafted, self.missed = list(map(len, tokens)), {}
        for row, early in enumerate(self.proposed):
            if early:
                tokens[row], sources[row], self.drafted[row] = early, EARLY, 0
        for row in self.joined:
            sources[row] = sources[row] if tokens[row] else NOTHING
        waiting = [row for row, goes_on in enumerate(self.live) if goes_on and row not in self.joined]
        missed, self.joined = [row for row in waiting if sources[row] == NOTHING], set()
        if missed and answer is not None:
            name = self.plan.fallback
            if name not in self.fallbacks:
                self.fallbacks[name] = PROPOSERS[name](self.request)
            asked = [row for row in missed if self.texts[row]]  # others have left since; the draft is told all the same
            proposals = self.fallbacks[name].propose(self.texts, asked, self.plan.lookahead) if asked else []
            self.missed = {**dict.fromkeys(missed, Proposal([])), **dict(zip(asked, proposals))}
            for row, proposal in self.missed.items():
                tokens[row], sources[row] = proposal.tokens, name
        width = max(map(len, tokens))
        lengths = [len(of_row) if goes_on else width for of_row, goes_on in zip(tokens, self.live)]
        tokens = padded(tokens, width)
        record = dataclasses.replace(found.record, sources=sources, lengths=lengths, lookahead=width)
        record.mode = PLAIN if answer is None and not self.has_no_draft else self.plan.mode
        record.early = max(self.plan.early, self.longest_forced)
        speculation = Speculation(tokens, None, record)
        siblings = [own if n else [] for own, n in zip(found.siblings or [[]] * len(tokens), self.drafted)]
        count = self.plan.nodes - width
        for row, early in enumerate(self.proposed):
            if early and count > 0 and record.mode != AHEAD:  # a draft knows no outcomes behind siblings of others
                siblings[row] = self.early.siblings(row, early, count)
        speculation.siblings = siblings if any(siblings) else None
        return speculation, bool(self.missed)

    @property
    def are_certain(self) -> bool:
        """Whether no token of the last speculation was drawn from a distribution."""
        return not any(self.drafted) and all(proposal.probabilities is None for proposal in self.missed.values())

    def distributions(
        self, tokens: list[list[int]], q: torch.FloatTensor | None, device: torch.device
    ) -> torch.FloatTensor:
        """Returns what the last tokens were drawn from `(rows, width, vocab_size)`; of the draft's that is `q`."""
        width = len(tokens[0])
        if q is not None and all(n == width or not goes_on for n, goes_on in zip(self.drafted, self.live)):
            return q
        result = point_masses(from_host(tokens, device), self.request.vocab_size)
        if q is not None:
            width = min(q.shape[1], width)
            is_drafted = torch.arange(width, device=device) < from_host(self.drafted, device)[:, None]
            result[:, :width] = torch.where(is_drafted[..., None], from_host(q[:, :width], device), result[:, :width])
        for row, (_, theirs) in self.missed.items():
            if theirs is not None:
                theirs = from_host(theirs[: result.shape[1]], device)
                result[row, : len(theirs)] = theirs
        return result


def point_masses(tokens: torch.LongTensor, vocab_size: int) -> torch.FloatTensor:
    """Returns distributions `(..., vocab_size)` in which each of the tokens `(...)` is certain."""
    empty = torch.zeros(*tokens.shape, vocab_size, dtype=torch.float32, device=tokens.device)
    return empty.scatter_(-1, tokens[..., None], 1.0)
