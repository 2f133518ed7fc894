"""A plan that the settings give, for calls in which nothing is measured and nothing is chosen."""

from ..config import SSDConfig
from ..rounds import AHEAD, CUSTOM, IN_TURN, PLAIN, PRIMARY, Plan, RoundRecord


def fallback_of(config: SSDConfig) -> str:
    """Returns the source of a row's speculation after a miss."""
    if not isinstance(config.fallback, str):
        return CUSTOM
    return PRIMARY if config.fallback == "auto" else config.fallback


def nodes_of(config: SSDConfig) -> int:
    """Returns the nodes of a row's token tree; 0 for a chain, which `"auto"` is."""
    return 0 if config.tree_nodes == "auto" else config.tree_nodes


class FixedPlan:
    """A [`Planner`] whose lookahead and budget are numbers. A planner of another kind can override `observe`."""

    expects_draft = False

    def __init__(self, config: SSDConfig):
        mode, budget = (AHEAD, config.budget) if config.asynchronous else (IN_TURN, 0)
        mode, budget = (mode, budget) if config.lookahead else (PLAIN, 0)
        self.plan = Plan(mode, config.lookahead, config.lookahead, budget, fallback_of(config), nodes=nodes_of(config))

    def begin_call(self) -> None:
        """Begins the call, once it has waited for its draft."""

    def observe(self, before: RoundRecord, now: RoundRecord) -> None:
        """Is told of each round, with the round before it."""

    def reason_of(self, records: list[RoundRecord]) -> str:
        """Returns why the most frequent mode of these rounds was chosen."""
        return "the settings are fixed"
