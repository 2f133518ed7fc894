"""How far and how widely to draft in each round: what a speculator asks, and the plan that never changes."""

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from ..config import SSDConfig
from ..theory import geometric_fan_out
from .outcomes import allocate

GUESSES = 32  # ranks of bonus tokens that are told apart
PREPARED, BACKUPS = "prepared", ("ngram", "random", "custom")  # where a speculation comes from, besides "primary"


@dataclass(frozen=True)
class Plan:
    """
    Args:
        lookahead (`int`): Tokens in the next speculations; 0 to rest.
        budget (`int`): Outcomes to prepare for each row; 0 to draft just in time only.
        fallback (`str`): Where a speculation comes from after a miss: `"primary"`, `"ngram"` or `"random"`.
        saguaro_c (`float`): C of Definition 14.
        acceptance_rate, power_law_exponent (`float`): The config's priors.
        drafts (`int`, *optional*): How many drafts prepare so many outcomes each.
    """

    lookahead: int
    budget: int
    fallback: str
    saguaro_c: float
    acceptance_rate: float
    power_law_exponent: float
    drafts: int = 1

    @property
    def total_budget(self) -> int:
        """Outcomes that are prepared for each row, by all drafts together."""
        return self.budget * self.drafts


@functools.lru_cache
def planned_fan_outs(lookahead: int, budget: int, acceptance_rate: float, power_law_exponent: float) -> list[int]:
    """
    The fan-out planned for each accepted count (Theorem 12), which Saguaro sampling needs before there is a round to
    look at.
    """
    return allocate(geometric_fan_out(lookahead, budget, acceptance_rate, power_law_exponent), budget)


@dataclass
class Round:
    """
    What the draft sees of a verified speculation.

    Args:
        lookahead (`int`): Tokens that were verified.
        accepted (`list[int]`): Accepted count of each row; -1 for a finished one.
        hits (`list[bool]`): Whether each row's outcome was prepared.
        sources (`list[str]`): Where each row's speculation had come from: `PREPARED`, `"primary"` or one of `BACKUPS`.
        ranks (`list[int | None]`): Which of the draft's guesses the bonus token was, from 0, if it was ranked at all.
        seconds (`float`): How long the target took for it; 0 if it was not measured.
        budget (`int`): How many outcomes of each row were prepared meanwhile.
        elapsed (`float`): Seconds from the outcome before to this one, whatever they were spent on; 0 if not measured.
        transit (`float`, *optional*): How much longer than that it took until the draft saw the outcome, for which it
            had waited, or which found it at work.
    """

    lookahead: int
    accepted: list[int]
    hits: list[bool]
    sources: list[str]
    ranks: list[int | None] = field(default_factory=list)
    seconds: float = 0.0
    budget: int = 0
    elapsed: float = 0.0
    transit: float | None = None


class Planner(ABC):
    """What a speculator asks and tells."""

    is_repeatable = True
    """Whether the plan does not depend on time. Then outcomes are always chosen, even if theirs is already there."""

    adapts_tokens = False
    """Whether the plan decides what is proposed, and not only when. Otherwise a seed gives the same tokens again."""

    patience = 0
    """For how many rounds it does without what they teach, if there is no time to learn."""

    compares_backups = False
    """Whether [`~Planner.observe_miss`] is of use."""

    @property
    def rest(self) -> int:
        """For how many rounds after the next one the plan is to rest for sure, so that no one need be asked."""
        return 0

    @property
    def rest_seconds(self) -> float:
        """How long that is to take."""
        return 0.0

    def begin(self) -> None:
        """Learns that a call begins, in which no row is finished yet."""

    @abstractmethod
    def plan(self) -> Plan:
        """Returns the plan for what is prepared next."""

    def think(self) -> None:
        """Works out what to do next. Asked when there is time, which there is not whenever a plan is asked for."""

    @abstractmethod
    def lookahead(self, known: list[float]) -> int:
        """
        Returns how many tokens to answer with.

        Args:
            known (`list[float]`): How many tokens are drafted already, for each row; 0 after a miss, infinity for a
                finished row.
        """

    def observe(self, round_: Round) -> None:
        """Learns from a round."""

    def observe_choice(self, seconds: float) -> None:
        """Learns how long it took from an answer until the next outcomes were chosen and could grow."""

    def observe_branches(self, tokens: int, seconds: float) -> None:
        """Learns what a forward pass over one token of each branch cost, while the target worked."""

    def observe_step(self, tokens: int, seconds: float) -> None:
        """Learns what a forward pass over so many tokens cost, while the target waited."""

    def observe_miss(self, kind: str, tokens: int) -> None:
        """Learns how many tokens a row gained, or would have gained, that missed and took what such a fallback gave."""


class FixedPlanner(Planner):
    """
    Does what the config says, always.

    Args:
        config (`SSDConfig`): Lookahead and budget are numbers.
        drafts (`int`, *optional*): How many share the work; each prepares a budget of its own.
    """

    patience = 1  # the cache shape's: what it learns of a round can wait until the branches for the next one have grown

    def __init__(self, config: SSDConfig, drafts: int = 1):
        c = 1.0 if config.saguaro_c == "auto" else config.saguaro_c
        priors = config.acceptance_rate, config.power_law_exponent
        self.fixed = Plan(config.lookahead, config.budget, first_fallback(config), c, *priors, drafts)

    def plan(self) -> Plan:
        return self.fixed

    def lookahead(self, known):
        return self.fixed.lookahead


def first_fallback(config: SSDConfig) -> str:
    """The fallback until there is reason for another; an object of the user's takes its place in the speculator."""
    return config.fallback if config.fallback in ("ngram", "random") else "primary"
