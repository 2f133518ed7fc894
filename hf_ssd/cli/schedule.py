"""How much of a check fits into its seconds."""

import math
from dataclasses import dataclass

from .methods import Run

LEAST = 12  # tokens of an answer from which its speed is known
ENOUGH = 24  # tokens of an answer below which assisted generation is left out
TURNS = 3  # a turn for each kind of question
MARGIN = 1.25  # the seconds that are asked for, over those that are expected


@dataclass(frozen=True)
class Schedule:
    """The later calls of a check."""

    tokens: int  # of an answer
    turns: int  # prompts that each method answers
    learning: int  # calls with SSD before these turns, in which the planner measures the pair
    assisted: bool  # whether assisted generation takes part

    def calls(self, methods: int) -> int:
        """Returns the number of calls. `methods` counts plain generation, SSD and each assisted generation."""
        return self.learning + self.turns * (methods if self.assisted else 2)

    def seconds(self, plain: Run, methods: int) -> float:
        """Returns how long the calls take, if each is as fast as a plain answer."""
        return self.calls(methods) * (plain.prefill + self.tokens / plain.speed)


def schedule_for(seconds: float, plain: Run, methods: int, tokens: int, repeats: int) -> Schedule | None:
    """
    Returns the largest schedule that fits into `seconds`, if any. If whole answers of `tokens` tokens do not fit, the
    answers are shorter; then assisted generation is left out; then there is a single turn.
    """
    few = min(TURNS, repeats)
    levels = [(turns, TURNS, True, tokens) for turns in range(repeats, few - 1, -1)]
    levels += [(few, TURNS, True, ENOUGH), (few, TURNS, False, LEAST), (1, 1, False, LEAST)]
    for turns, learning, assisted, least in levels:
        calls = Schedule(0, turns, learning, assisted).calls(methods)
        fitting = math.floor((seconds / calls - plain.prefill) * plain.speed)
        if fitting >= min(least, tokens):
            return Schedule(min(fitting, tokens), turns, learning, assisted)
    return None


def seconds_asked(spent: float, plain: Run, methods: int, tokens: int, repeats: int) -> int:
    """Returns the `--seconds` in which a check with whole answers and all methods fits, in tens of seconds."""
    whole = Schedule(tokens, min(TURNS, repeats), TURNS, True)
    return 10 * math.ceil(MARGIN * (spent + whole.seconds(plain, methods)) / 10)
