"""A plan that the settings give, for calls in which nothing is measured and nothing is chosen."""

from ..config import SSDConfig
from ..rounds import AHEAD, IN_TURN, MTP, PRIMARY, Plan, RoundRecord


class FixedPlan:
    """
    Takes the place of a [`Planner`] where lookahead and budget are numbers. A planner of another kind can override
    `observe` and set `plan`.

    Args:
        config (`SSDConfig`): The settings.
        is_parallel (`bool`, *optional*): Whether the draft gives all tokens of its branches in one forward pass.

    Attributes:
        plan ([`Plan`]): The plan for the next round.
        expects_draft (`bool`): Class attribute: see [`Planner`].
        reads_first (`bool`): Class attribute: whether parallel drafts read the speculation in a separate pass.
    """

    expects_draft = reads_first = False

    def __init__(self, config: SSDConfig, is_parallel: bool = False):
        mode, budget = (AHEAD, config.budget) if config.asynchronous else (IN_TURN, 0)
        is_named = isinstance(config.fallback, str) and config.fallback not in ("auto", MTP)
        fallback = config.fallback if is_named else PRIMARY
        c = 1.0 if config.saguaro_c == "auto" else config.saguaro_c
        feeds_first = not is_parallel or self.reads_first
        self.plan = Plan(mode, config.lookahead, config.lookahead, budget, fallback, c, feeds_first)

    def begin_call(self) -> None:
        """Begins the call, once it has its turn with the draft."""

    def observe(self, before: RoundRecord, now: RoundRecord) -> None:
        """Is told of each round, with the round before it."""

    def reason_of(self, records: list[RoundRecord]) -> str:
        """Returns why the most frequent mode of these rounds was chosen."""
        return "the settings are fixed"
