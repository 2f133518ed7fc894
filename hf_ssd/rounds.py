"""One round as data: the four types that target and draft share."""

import time
from dataclasses import dataclass, field

import torch

from . import config

PLAIN, IN_TURN, AHEAD = MODES = ("plain", "in_turn", "ahead")

_, PRIMARY, *BUILT_IN = config.FALLBACKS  # "primary": drafted just in time by the draft model
NGRAM, RANDOM, CUSTOM = "ngram", "random", "custom"
PREPARED = "prepared"  # the outcome was in the speculation cache: a hit
FILLER = "filler"  # no draft has seen it: the target times a wider pass
NOTHING = "nothing"  # the row has no speculation
FALLBACKS = (*BUILT_IN, CUSTOM)
SOURCES = (PREPARED, PRIMARY, *FALLBACKS, FILLER, NOTHING)  # where the speculation of a row comes from

FINISHED = -1  # accepted count of a row that needs no more tokens


@dataclass(frozen=True)
class Plan:
    """
    What the draft is to do, decided by the target and sent with each outcome.

    Args:
        mode (`str`): `"plain"` (no draft), `"in_turn"` (draft after the outcome) or `"ahead"` (SSD).
        lookahead (`int`): Tokens in the next speculations, K in the paper.
        after_miss (`int`): Tokens to draft just in time after a miss, at most `lookahead`.
        budget (`int`): Outcomes to prepare for each row, B in the paper; 0 unless the mode is `"ahead"`.
        fallback (`str`): Where the speculation of a row comes from after a miss.
        saguaro_c (`float`): C of Definition 14.
        feeds_first (`bool`): Whether a parallel drafter reads the speculation before it chooses outcomes, which takes a
            pass more and ranks bonus tokens better. Others always do.
    """

    mode: str
    lookahead: int = 0
    after_miss: int = 0
    budget: int = 0
    fallback: str = PRIMARY
    saguaro_c: float = 1.0
    feeds_first: bool = False


@dataclass
class Outcome:
    """
    What a verification decided, as integers of the host.

    Args:
        accepted (`list[int]`): Accepted count of each row, `FINISHED` for a row that is left out.
        bonus (`list[int]`): The token of each row that follows the accepted ones.
        later (`list[list[int]]`, *optional*): The tokens of each row that followed in later rounds, in which the draft
            proposed nothing; none for a row that is left out. `None` if there was no such round.
    """

    accepted: list[int]
    bonus: list[int]
    later: list[list[int]] | None = None

    def followed_by(self, other: "Outcome", proposed: list[list[int]]) -> "Outcome":
        """
        Returns the outcome that a draft is told after one more round, in which it had proposed nothing.

        Args:
            other ([`Outcome`]): The outcome of that round.
            proposed (`list[list[int]]`): The tokens of each row that were verified in it.
        """
        later, accepted = self.later or [[] for _ in self.bonus], list(self.accepted)
        for row, (k, bonus) in enumerate(zip(other.accepted, other.bonus)):
            if k == FINISHED:  # nothing of this row is drafted any more
                later[row], accepted[row] = [], FINISHED
            else:
                later[row] = [*later[row], *proposed[row][:k], bonus]
        return Outcome(accepted, self.bonus, later)


@dataclass
class RoundRecord:
    """
    What one round accepted, hit and took. A *round* is one verification of one speculation for each row. The draft
    begins the record and the target completes it. Times are in seconds; moments are those of `time.perf_counter()` on
    the way and seconds since the call's beginning in [`SSDStats`] (clocks of two machines differ).

    Args:
        mode (`str`): The plan's mode.
        lookahead (`int`): Drafted tokens that were verified.
        budget (`int`): Outcomes that had been prepared for each row before this speculation was asked for.
        sources (`list[str]`): Where the speculation of each row came from, one of `SOURCES`.
        ranks (`list[int]`): Which of the draft's guesses the bonus token before this speculation was, -1 if none.
        ngram_matches (`list[int]`): How many tokens of an earlier round the n-gram fallback would have got right, -1 if
            it was not tried.
        accepted (`list[int]`): Accepted count of each row; empty until the target has decided.
        grown (`int`): Tokens of each branch that had grown by then.
        passes, steps (`int`): Forward passes that grew branches, and that drafted just in time.
        choose_seconds, grow_seconds (`float`): What it took to choose outcomes and to grow their branches.
        answer_seconds (`float`): What the draft worked after the outcome was known.
        verify_seconds (`float`): From having the speculation to having decided on it.
        wait_seconds (`float`): From having nothing left to do to having the speculation.
        prepared_at, answered_at (`float`): When the draft began to prepare and to answer; 0 if it did not.
        received_at (`float`): When the target had the speculation.
        compiles (`bool`): Whether a forward pass was compiled in its verification, so that its time tells nothing.
    """

    mode: str = PLAIN
    lookahead: int = 0
    budget: int = 0
    sources: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    ngram_matches: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
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

    @property
    def hits(self) -> list[bool]:
        """Whether the outcome of each row was among those prepared for, however far its speculation had grown."""
        return [source == PREPARED for source in self.sources]

    @property
    def draft_seconds(self) -> float:
        """What the draft worked for this speculation, preparing and answering."""
        return self.choose_seconds + self.grow_seconds + self.answer_seconds

    @property
    def live(self) -> list[int]:
        """The rows that were not finished when this speculation was verified."""
        return [row for row, k in enumerate(self.accepted) if k != FINISHED]


@dataclass
class Speculation:
    """
    What the target verifies next, or, in the draft, what there is of it: then rows differ in length.

    Args:
        tokens (`list[list[int]]`): The drafted tokens of each row, on the host.
        probabilities (`torch.FloatTensor` of shape `(batch_size, lookahead, vocab_size)`, *optional*): The distribution
            each was drawn from; `None` if each token was certain or the probabilities follow later.
        record ([`RoundRecord`]): The draft's part of the record.
        costs (`tuple[float, float, float]`, *optional*): The draft's profile: seconds to choose outcomes, seconds of a
            forward pass, and seconds for each token in it.
        support (`int`, *optional*): The most tokens that have any chance in one of the distributions, if it is known.
    """

    tokens: list[list[int]]
    probabilities: torch.FloatTensor | None = None
    record: RoundRecord = field(default_factory=RoundRecord)
    costs: tuple[float, float, float] | None = None
    support: int | None = None

    @property
    def width(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.tokens))

    @classmethod
    def empty(cls, rows: int, source: str = NOTHING) -> "Speculation":
        """Returns a speculation without tokens."""
        return cls([[] for _ in range(rows)], None, RoundRecord(sources=[source] * rows))


def since(start: float) -> float:
    """Returns the seconds since a moment of `time.perf_counter()`."""
    return time.perf_counter() - start
