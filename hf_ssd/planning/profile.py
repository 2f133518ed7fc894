"""The profile of a pair, which is asked for until it is known."""

from ..rounds import AHEAD
from .experience import Durations

WANTED, RUNNING, KNOWN = "wanted", "running", "known"

FILLERS = (0, 7, 0, 0)  # filler tokens in the plain rounds during which the worker times its passes
MOST_WIDE_PASSES = 3  # that are asked for. A call may end before one, or the round may compile and teach nothing


class Profile:
    """
    One call's part in the profile of its pair: the worker times its passes while the target decodes plainly, and the
    target times a pass that is wider by filler tokens. A call that ends before the worker has told its times leaves the
    profile to the next one.

    Args:
        durations ([`Durations`]): What is known of the pair.
        is_needed (`bool`): Whether the plan depends on it.
        has_fillers (`bool`): Whether the target decodes plainly meanwhile.
    """

    def __init__(self, durations: Durations, is_needed: bool, has_fillers: bool):
        self.durations, self.is_needed, self.has_fillers = durations, is_needed, has_fillers
        self.left: list[int] | None = None

    @property
    def state(self) -> str:
        """`"wanted"` until a worker begins, `"running"` until it answers, `"known"` if it has told its times."""
        if self.left is not None:
            return RUNNING
        return WANTED if self.is_needed and not self.durations.branches.count else KNOWN

    def begin(self) -> None:
        """A worker begins to time its passes."""
        is_wide_known = self.durations.verification[AHEAD].count or self.durations.fillers >= MOST_WIDE_PASSES
        self.left = list(FILLERS[:1] if is_wide_known else FILLERS) if self.has_fillers else []

    def next_filler(self) -> int | None:
        """Returns how many filler tokens the next plain round verifies; `None` when the worker is to be asked."""
        if not self.left:
            return None
        filler = self.left.pop(0)
        self.durations.fillers += filler > 0
        return filler

    def end(self) -> None:
        """The worker has answered, whether with its times or without."""
        self.left = None
