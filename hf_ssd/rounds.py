"""The data of a round: four types that target and draft share."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from . import config

PLAIN, IN_TURN, AHEAD = MODES = ("plain", "in_turn", "ahead")

_, PRIMARY, *BUILT_IN = config.FALLBACKS  # "primary": drafted just in time by the draft model
NGRAM, RANDOM, CUSTOM = "ngram", "random", "custom"
EARLY, EARLY_TITLE = NGRAM, "n-grams"  # the source that needs no draft: its tokens leave with the outcome
LONGEST_EARLY = 16  # tokens
PREPARED = "prepared"  # the outcome was in the speculation cache: a hit
NOTHING = "nothing"  # the row has no speculation
BY_TARGET = (*BUILT_IN, CUSTOM)  # sources in the target's process
SOURCES = (PREPARED, PRIMARY, *BY_TARGET, NOTHING)  # where the speculation of a row comes from
FINISHED = -1  # accepted count of a row that needs no more tokens: it gains none, not even a bonus token


@dataclass(frozen=True)
class Plan:
    """Instructions for the next speculations, decided by the target. Those for the draft are sent with each outcome."""

    mode: str  # "plain" (no draft), "in_turn" (draft after the outcome) or "ahead" (SSD)
    lookahead: int = 0  # tokens in a speculation, K in the paper
    after_miss: int = 0  # tokens to draft just in time after a miss, at most `lookahead`
    budget: int = 0  # outcomes to prepare for each row, B in the paper; 0 unless the mode is "ahead"
    fallback: str = PRIMARY  # the source of a row's speculation after a miss
    early: int = 0  # most tokens of the early proposer, which a row takes in the place of drafted tokens if it has some
    nodes: int = 0  # of a row's token tree; a chain unless they are more than the tokens of the speculation


@dataclass
class Outcome:
    """What verification has added to the rows since the draft was last told, on the host."""

    tokens: list[list[int]]  # of one round or more; empty for a row that needs no more
    # Certain tokens that the target's process proposes for each row next; empty for a row that is drafted for.
    proposed: list[list[int]] | None = None
    # The target's hidden states (tokens, width) at the tokens that the draft has none for, row after row, or a function
    # of these two numbers that receives them; `None` if no draft reads them.
    states: torch.Tensor | Callable[[int, int], torch.Tensor] | None = None

    @classmethod
    def of(cls, verified: list[list[int]], accepted: list[int], bonus: list[int]) -> "Outcome":
        """Returns the outcome of a round that verified these tokens. A row that is left out accepts `FINISHED`."""
        rows = zip(verified, accepted, bonus)
        return cls([[] if k == FINISHED else [*tokens[:k], token] for tokens, k, token in rows])

    @property
    def accepted(self) -> list[int]:
        """The accepted count of each row, if these are the tokens of one round."""
        return [len(tokens) - 1 for tokens in self.tokens]


@dataclass
class RoundRecord:
    """
    The accepted counts, hits and times of a round. A *round* is a verification of one speculation for each row. The
    draft begins the record and the target completes it. Durations are in seconds. Time stamps are `time.perf_counter()`
    values during a round, and seconds since the start of the call once they are in [`SSDStats`] (clocks of two machines
    differ).

    Args:
        mode (`str`): The plan's mode.
        lookahead (`int`): Number of drafted tokens that were verified in each row. Rows with fewer tokens of their own
            are padded.
        budget (`int`): Number of outcomes prepared for each row before this speculation was requested.
        sources (`list[str]`): The source of each row's speculation, from `SOURCES`.
        ranks (`list[int]`): For each row, the rank of the bonus token before this speculation among the draft's
            guesses, from 0; -1 if it was not among them.
        lengths (`list[int]`): For each row, how many of the tokens were proposed, the rest being padding; -1, or an
            empty list, for all of them. See `proposed`.
        early_alone, early_beside (`list[int]`): For each row, how many tokens the early proposer gave, or would have
            given, in the round before this speculation, the bonus token included, where nothing is drafted and beside a
            draft; 0 if it had none, -1 if that was not evaluated. Empty if no row was evaluated.
        accepted (`list[int]`): Accepted count of each row; empty until the target has decided.
        states (`int`): How many recurrent states of each row the draft's memory has room for, which bounds the budget:
            each token of a branch has a state of its own. 0 if the draft has no recurrent states.
        grown (`int`): Number of tokens that each prepared branch had when its outcome was looked up.
        passes, steps (`int`): Forward passes that grew branches, and forward passes that drafted just in time.
        choose_seconds, grow_seconds (`float`): Time to choose outcomes, and time to grow their branches.
        answer_seconds (`float`): Time that the draft worked after the outcome was known.
        verify_seconds (`float`): Time from receiving the speculation to deciding its outcome.
        wait_seconds (`float`): Time that the target waited for the speculation with no other work left.
        prepared_at, answered_at (`float`): When the draft began to prepare and to answer; 0 if it did not, which
            becomes a negative number in [`SSDStats`].
        received_at (`float`): When the target received the speculation.
        compiles (`bool`): Whether a forward pass was compiled or captured in the verification, so that
            `verify_seconds` is not typical.
        divided (`bool`): Whether the target had only its share of the CPU cores in the verification.
        early (`int`): The plan's most early tokens. If it is not 0, rows whose source is the early proposer have taken
            them in the place of drafted tokens, whether their outcome had been prepared or not.
        nodes (`int`): How many nodes of a token tree were verified in each row; 0 for a chain.
        turns (`list[int]`): For each row, the accepted count with which it has left the chain of its tree by a sibling
            of a drafted token; 0 if no sibling was on the path that was decided. Empty for chains.
    """

    mode: str = PLAIN
    lookahead: int = 0
    budget: int = 0
    sources: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    early_alone: list[int] = field(default_factory=list)
    early_beside: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    states: int = 0
    grown: int = 0
    passes: int = 0
    steps: int = 0
    choose_seconds: float = 0.0
    grow_seconds: float = 0.0
    answer_seconds: float = 0.0
    verify_seconds: float = 0.0
    wait_seconds: float = 0.0
    prepared_at: float = 0.0
    answered_at: float = 0.0
    received_at: float = 0.0
    compiles: bool = False
    divided: bool = False
    early: int = 0
    nodes: int = 0
    turns: list[int] = field(default_factory=list)

    @property
    def hits(self) -> list[bool]:
        """Whether the outcome of each row had been prepared, no matter how many tokens of it had been drafted."""
        return [source == PREPARED for source in self.sources]

    def proposed(self, row: int) -> int:
        """Returns how many tokens were proposed for a row, padding excluded."""
        length = self.lengths[row] if self.lengths else -1
        return self.lookahead if length < 0 else min(length, self.lookahead)

    def is_early(self, row: int) -> bool:
        """Whether the row has taken early tokens in the place of drafted tokens, not because its outcome was missed."""
        return self.early > 0 and self.sources[row] == EARLY

    def took_sibling(self, row: int) -> bool:
        """Whether the last accepted token of a row was a sibling of a drafted token."""
        return bool(self.turns) and self.accepted[row] == self.turns[row] > 0

    def of_chain(self, row: int) -> int:
        """Returns how many tokens of the chain a row has accepted, a sibling not counted."""
        return self.accepted[row] - self.took_sibling(row)

    @property
    def is_hit(self) -> bool:
        """Whether no unfinished row missed, and not all of them have early tokens."""
        asked = [row for row in self.live if not self.is_early(row)]
        return bool(asked) and all(self.hits[row] for row in asked)

    @property
    def draft_seconds(self) -> float:
        """Time that the draft worked on this speculation, preparing and answering."""
        return self.choose_seconds + self.grow_seconds + self.answer_seconds

    @property
    def live(self) -> list[int]:
        """The rows that were not finished when this speculation was verified."""
        return [row for row, k in enumerate(self.accepted) if k != FINISHED]


@dataclass
class Speculation:
    """The tokens of each row that the target verifies next, on the host. Rows differ in length while tokens lack."""

    tokens: list[list[int]]
    # What each was drawn from (batch_size, lookahead, vocab_size); `None` if all are certain, or if they follow later.
    probabilities: torch.FloatTensor | None = None
    record: RoundRecord = field(default_factory=RoundRecord)  # the draft's part of it
    support: int | None = None  # the largest number of tokens with a nonzero probability, if it is known
    # Leaves of a tree, (depth, token), each of which is verified beside the drafted token number `depth`.
    siblings: list[list[tuple[int, int]]] | None = None
    beside: list[list[list[int]]] | None = None  # within the draft, see [`~hf_ssd.drafting.siblings.beside`]

    @property
    def width(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.tokens))

    @classmethod
    def empty(cls, rows: int) -> "Speculation":
        return cls([[] for _ in range(rows)], None, RoundRecord(sources=[NOTHING] * rows))


def padded(tokens: list[list[int]], width: int) -> list[list[int]]:
    """Returns the first `width` tokens of each row. Shorter rows are filled with token 0."""
    return [row[:width] + [0] * (width - len(row)) for row in tokens]


def since(start: float) -> float:
    """Returns the seconds since `start`, a value of `time.perf_counter()`."""
    return time.perf_counter() - start


def of_row(record: RoundRecord | None, row: int) -> RoundRecord:
    """Returns the part of a round's record that is about a row."""
    if record is None:
        return RoundRecord()
    lists = {name: each[row : row + 1] for name, each in vars(record).items() if isinstance(each, list)}
    return replace(record, **lists)
