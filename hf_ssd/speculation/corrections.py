"""How far the predicted speed of a plan is from its real one."""

from .costs import Average

ALIKE_KINDS, ALIKE_PLANS = 16, 24  # rounds that what is known of other kinds, or other plans of a kind, counts for
FADING = 0.99  # what is left, after a round of another plan, of what is known of one, of those like it, or of a kind
UNTRIED = 0.2  # how much better than predicted a plan may be of which no round is known
FEW = 6  # outcomes of each row; with more of them, the draft leaves the target less of what they share
MOST = 4.0  # one hiccup of the machine must not condemn a plan


class Corrections:
    """
    A model of a round's parts leaves out what is in no part's measure, and that differs from plan to plan. So what
    rounds really take is kept by plan. A plan that was hardly tried is taken to be like others of its *kind*: drafting
    ahead for few or for many outcomes, or in turn; and a kind that was hardly tried like others that draft ahead. A
    plan that was given up because the machine was busy just then becomes like its kind again, and so do plans for few
    outcomes, or for many; and a kind that was given up becomes what is predicted of it. (How long a round of rest takes
    is not predicted but measured.)
    """

    def __init__(self):
        self.known: dict[object, Average] = {}

    def observe(self, plan: tuple[int, int], ratio: float, rounds: int) -> None:
        """
        Learns from so many rounds.

        Args:
            plan (`tuple[int, int]`): Lookahead and budget.
            ratio (`float`): Seconds that they took for each token to be expected of it, over what was predicted.
        """
        names = _names(plan)
        for other, average in self.known.items():
            if other not in names:
                average.fade(FADING**rounds)
        for name in names:
            for _ in range(rounds):
                self.known.setdefault(name, Average(1.0, 0.0, memory=0.98)).observe(min(MOST, ratio))

    def __call__(self, plan: tuple[int, int]) -> float:
        """Returns by how much the predicted seconds of a plan are to be multiplied."""
        value = 1.0
        for name in _names(plan):
            known = self.known.get(name)
            if known is not None:
                alike = ALIKE_PLANS if _is_plan(name) else ALIKE_KINDS
                value = (known.total + alike * value) / (known.weight + alike)
        return value

    def hope(self, plan: tuple[int, int]) -> float:
        """Returns how much better than it looks a plan may be, 1 for one that was tried often."""
        own = self.known.get(plan)
        return 1.0 + UNTRIED / (1.0 + (own.weight if own is not None else 0.0) / ALIKE_KINDS) ** 0.5


def kind_of(lookahead: int, budget: int) -> str:
    """Returns how a plan drafts: `"ahead"`, `"in turn"`, or not at all (`"rest"`)."""
    if lookahead == 0:
        return "rest"
    return "ahead" if budget else "in turn"


def _names(plan: tuple[int, int]) -> tuple:
    """What rounds of a plan tell something about, the most general first."""
    return kind_of(*plan), (kind_of(*plan), plan[1] <= FEW), plan


def _is_plan(name: object) -> bool:
    return isinstance(name, tuple) and isinstance(name[0], int)
