"""What comes next: the plan that is predicted to be fastest, a rest, or a look at what is not known well enough."""

import math

from .corrections import Corrections
from .measurements import Measurements
from .rests import Rests

EXPLORED = ((4, 8), (7, 8), (4, 8), (1, 8), (7, 0), (1, 0), (4, 0))
"""
Lookahead and budget of the first rounds of an unknown pair, so that there is a measured time for everything. Plain
decoding comes next, unless it is out of the question.
"""
FIRST_LOOK, LONGEST_BETWEEN_LOOKS = 24, 192  # rounds until it is seen again what it would be like otherwise
ROUNDS_OF_A_LOOK, SHORTEST_LOOK, SECONDS_OF_A_LOOK = 5, 2, 0.05
ROUNDS_AFTER_A_REST, NEARLY = 16, 0.92  # if drafting is predicted to be nearly as good: a few rounds tell too little
WORTH_A_LOOK = 0.7  # share of the best speed that must be predicted for something to look at it
UNSEEN = 2.5  # how many times as fast as it looks plain decoding may be, until seen: a target that waits is slower
UNSETTLED = 2  # rounds after a change that are no measure: a processor that has waited is slower for a while
UNSETTLED_REST, LONGEST_UNSETTLED_REST = 0.1, 16  # seconds, rounds: a core is slower while others have had work
WORTH_A_CHANGE = 1.02  # predicted gain below which a plan stays as it is
ENOUGH_DRAFTED, CLEARLY = 16, 0.75  # rounds of drafting ahead before it may be given up, unless it is clearly worse
NOT_WORSE = 0.97  # share of plain decoding's speed that is enough to go on drafting: who rests learns nothing
USELESS = 0.4  # acceptance rate


class Agenda:
    """
    Decides what to do until the next decision, which is due in a few rounds. What is not done is not measured either:
    so the plan that looks best is left now and then, for a few rounds, to see what others are like.

    Args:
        measured ([`~hf_ssd.speculation.measurements.Measurements`]): What is known of times and acceptance.
        corrections ([`~hf_ssd.speculation.corrections.Corrections`]): How well the plans are known.
    """

    def __init__(self, measured: Measurements, corrections: Corrections):
        self.measured, self.corrections, self.rests = measured, corrections, Rests()
        self.due = self.looks_until = len(EXPLORED)  # rounds
        self.looks, self.look_at = 0, FIRST_LOOK
        self.drafted = 0  # rounds of drafting ahead
        self.has_rested, self.tried_until, self.tries = False, 0, 0

    @property
    def is_look(self) -> bool:
        """Whether what is done now was chosen to be seen, and not because it looks best."""
        return self.due == self.looks_until

    def unsettled(self, kind: str) -> int:
        """How many rounds are no measure after a change to another kind of plan."""
        if kind != "rest":
            return UNSETTLED
        return min(max(UNSETTLED, math.ceil(UNSETTLED_REST / self.measured.plain_decoding())), LONGEST_UNSETTLED_REST)

    def next(self, now: tuple[int, int], speeds: dict[tuple[int, int], float], resting: float) -> tuple[int, int]:
        """
        Args:
            now (`tuple[int, int]`): Lookahead and budget of the plan in use.
            speeds (`dict[tuple[int, int], float]`): Predicted tokens per second of each plan that drafts.
            resting (`float`): The same of plain decoding, 0 if it may not be chosen.

        Returns:
            Lookahead and budget of the next rounds, until [`~Agenda.due`].
        """
        rounds = self.measured.rounds
        self.due = rounds + min(16, max(4, rounds // 8))
        best = max(speeds, key=speeds.get)
        if not self.has_rested and UNSEEN * resting > speeds[best]:
            return self._look_at_rest()
        # The first rounds of a process are slower, and the beginning of a text is not like the rest of it.
        if self.drafted < ENOUGH_DRAFTED and self.measured.acceptance(1)[0] > USELESS:
            ahead = max((plan for plan in speeds if plan[1]), key=speeds.get, default=best)
            if speeds[ahead] > CLEARLY * max(speeds[best], resting):
                return ahead
        if speeds[best] < NOT_WORSE * resting:
            if now[0] == 0:
                best = self._to_try(best, speeds)
            return self._rest_or_try(now, best, speeds[best] > NEARLY * resting)
        self.rests.forget()
        if speeds[best] < WORTH_A_CHANGE * speeds.get(now, 0.0):
            best = now
        return best if rounds < self.look_at else self._look(best, speeds, resting)

    def _look(self, best: tuple[int, int], speeds: dict[tuple[int, int], float], resting: float) -> tuple[int, int]:
        """
        Looks in turn at resting, at the other way of drafting, and at the most promising of all plans, for a few
        rounds, where what is predicted for them is not out of the question.
        """
        self.looks += 1
        self.look_at = self.measured.rounds + min(LONGEST_BETWEEN_LOOKS, FIRST_LOOK * 2 ** (self.looks // 3))
        if resting and self.looks % 3 == 1:
            other = {(0, 0): resting}
        elif self.looks % 3 == 2:
            other = {plan: speed for plan, speed in speeds.items() if (plan[1] == 0) != (best[1] == 0)}
        else:
            other = {plan: speed * self.corrections.hope(plan) for plan, speed in speeds.items() if plan != best}
            other = {plan: speed for plan, speed in other.items() if speed > speeds[best]}
        candidate = max(other, key=other.get, default=best)
        if other.get(candidate, 0.0) < WORTH_A_LOOK * speeds[best]:
            return best
        return self._look_at_rest() if candidate == (0, 0) else self._try(candidate)

    def _look_at_rest(self) -> tuple[int, int]:
        """Sees how long plain decoding takes: for a few rounds, or fewer where they are long."""
        self.has_rested = True
        measured = math.ceil(SECONDS_OF_A_LOOK / self.measured.plain_decoding())
        measured = min(max(SHORTEST_LOOK, measured), ROUNDS_OF_A_LOOK)
        self.due = self.looks_until = self.measured.rounds + self.unsettled("rest") + measured + 1
        return 0, 0

    def _to_try(self, best: tuple[int, int], speeds: dict[tuple[int, int], float]) -> tuple[int, int]:
        """After every other rest, the best plan of the other way of drafting, if that is not out of the question."""
        self.tries += 1
        other = max((plan for plan in speeds if (plan[1] == 0) != (best[1] == 0)), key=speeds.get, default=best)
        return other if self.tries % 2 and speeds[other] > WORTH_A_LOOK * speeds[best] else best

    def _rest_or_try(self, now: tuple[int, int], best: tuple[int, int], is_close: bool) -> tuple[int, int]:
        """
        Rests ([`Rests`] says how long), and in between sees for a few rounds how it is now, or for some more if it is
        close. If it is long ago that plain decoding was measured, that comes first.
        """
        is_drafting, rounds = now[0] > 0, self.measured.rounds
        if is_drafting and is_close and rounds < self.tried_until:
            return self._try(best)
        if is_drafting and self.measured.plain_is_old:
            return self._look_at_rest()
        if is_drafting or rounds <= self.looks_until:
            self.due = rounds + self.rests.next(self.measured.plain_decoding(), is_close)
            return 0, 0
        self.tried_until = rounds + ROUNDS_AFTER_A_REST
        return self._try(best)

    def _try(self, plan: tuple[int, int]) -> tuple[int, int]:
        """Sees for a few rounds what a plan is like."""
        self.due = self.looks_until = self.measured.rounds + ROUNDS_OF_A_LOOK
        return plan
