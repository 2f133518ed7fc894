"""How far the predicted speed of a plan is from its real one."""

from .costs import Average

ALIKE = 16  # rounds that what is known of other plans of a kind counts for
UNTRIED = 0.2  # how much better than predicted a plan may be of which no round is known
MOST = 4.0  # one hiccup of the machine must not condemn a plan


class Corrections:
    """
    A model of a round's parts leaves out what is in no part's measure, and that differs from plan to plan. So what
    rounds really take is kept by plan. A plan that was hardly tried is taken to be like others of its *kind*: drafting
    ahead or in turn. (How long a round of rest takes is not predicted but measured.)
    """

    def __init__(self):
        self.kinds: dict[str, Average] = {}
        self.plans: dict[tuple[int, int], Average] = {}

    def observe(self, plan: tuple[int, int], ratio: float) -> None:
        """
        Learns from a round.

        Args:
            plan (`tuple[int, int]`): Lookahead and budget.
            ratio (`float`): Seconds that it took for each token to be expected of it, over what was predicted.
        """
        ratio = min(MOST, ratio)
        self.kinds.setdefault(kind_of(*plan), Average(1.0, 10.0, memory=0.98)).observe(ratio)
        self.plans.setdefault(plan, Average(1.0, 0.0, memory=0.98)).observe(ratio)

    def __call__(self, plan: tuple[int, int]) -> float:
        """Returns by how much the predicted seconds of a plan are to be multiplied."""
        kind, own = self.kinds.get(kind_of(*plan)), self.plans.get(plan)
        together = 1.0 if kind is None else kind.value
        if own is None:
            return together
        return (own.total + ALIKE * together) / (own.weight + ALIKE)

    def hope(self, plan: tuple[int, int]) -> float:
        """Returns how much better than it looks a plan may be, 1 for one that was tried often."""
        own = self.plans.get(plan)
        return 1.0 + UNTRIED / (1.0 + (own.weight if own is not None else 0.0) / ALIKE) ** 0.5


def kind_of(lookahead: int, budget: int) -> str:
    """Returns how a plan drafts: `"ahead"`, `"in turn"`, or not at all (`"rest"`)."""
    if lookahead == 0:
        return "rest"
    return "ahead" if budget else "in turn"
