"""How much of a check fits into its seconds."""

import math
from typing import NamedTuple

from .methods import Run

LEAST = 12  # tokens of an answer from which its speed is known
ENOUGH = 24  # tokens of an answer below which assisted generation is left out
TURNS = 3  # a turn for each kind of question, and as many calls with SSD before them, in which it measures the pair
MARGIN = 1.25  # the seconds that are asked for, over those that are expected


class Schedule(NamedTuple):
    tokens: int  # of an answer
    turns: int
    before: int  # calls with SSD before the turns
    methods: int  # that are compared


def schedule_for(seconds: float, plain: Run, methods: int, tokens: int, repeats: int) -> Schedule | None:
    """Returns the part of a check that fits into `seconds`, or `None` if no comparison does."""
    few = min(TURNS, repeats)
    levels = [(turns, TURNS, methods, tokens) for turns in range(repeats, few - 1, -1)]
    # Then answers are shorter; then plain generation and SSD are compared alone; then in a single turn.
    levels += [(few, TURNS, methods, ENOUGH), (few, TURNS, 2, LEAST), (1, 1, 2, LEAST)]
    for turns, before, compared, least in levels:
        fitting = math.floor((seconds / (before + turns * compared) - plain.prefill) * plain.speed)
        if fitting >= min(least, tokens):
            return Schedule(min(fitting, tokens), turns, before, compared)
    return None


def seconds_asked(spent: float, plain: Run, methods: int, tokens: int, repeats: int) -> int:
    """Returns the `--seconds` in which a check with whole answers and all methods fits, in tens of seconds."""
    calls = TURNS + min(TURNS, repeats) * methods
    return 10 * math.ceil(MARGIN * (spent + calls * (plain.prefill + tokens / plain.speed)) / 10)
