"""The profile of a pair, which calls request until it is known."""

from ..rounds import AHEAD
from .experience import Durations

WANTED, RUNNING, KNOWN = "wanted", "running", "known"

FILLERS = (0, 7, 0, 0)  # filler tokens in the plain rounds during which the worker times its passes
MOST_WIDE_PASSES = 3  # to request, as a call may end before its wide pass, or the pass may compile and teach nothing


class Profile:
    """
    The part of a call in the profile of its pair: the worker times its passes while the target decodes plainly, and the
    target times a pass that is wider by filler tokens. A call that ends before the worker has reported its times leaves
    the profile to the next call.

    Args:
        durations ([`Durations`]): The measurements of the pair.
        is_needed (`bool`): Whether the plan depends on the profile.
        has_fillers (`bool`): Whether the target decodes plainly meanwhile.
    """

    def __init__(self, durations: Durations, is_needed: bool, has_fillers: bool):
        self.durations, self.is_needed, self.has_fillers = durations, is_needed, has_fillers
        self.left: list[int] | None = None

    @property
    def state(self) -> str:
        """`"wanted"` until a worker begins, `"running"` until it answers, `"known"` if it has times or needs none."""
        if self.left is not None:
            return RUNNING
        return WANTED if self.is_needed and not self.durations.branches.count else KNOWN

    def begin(self) -> None:
        """Notes that a worker begins to time its passes."""
        is_wide_known = self.durations.verification[AHEAD].count or self.durations.fillers >= MOST_WIDE_PASSES
        self.left = list(FILLERS[:1] if is_wide_known else FILLERS) if self.has_fillers else []

    def next_filler(self) -> int | None:
        """Returns how many filler tokens the next plain round verifies; `None` when to ask the worker."""
        if not self.left:
            return None
        filler = self.left.pop(0)
        self.durations.fillers += filler > 0
        return filler

    def end(self) -> None:
        """Notes that the worker has answered, with its times or without."""
        self.left = None
