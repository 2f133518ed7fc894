"""Types for options, by which argparse refuses wrong values before anything is loaded."""

import argparse
import math
from collections.abc import Callable


def at_least(low: float, kind: type = int, below: float = math.inf) -> Callable[[str], float]:
    """
    Returns an argparse type for numbers in a range.

    Args:
        low (`float`): The smallest number that is allowed.
        kind (`type`, *optional*, defaults to `int`): `int` or `float`.
        below (`float`, *optional*): Upper limit, which is not allowed itself.
    """

    def number(text: str) -> float:
        value = kind(text)
        if not low <= value < below:  # also true of NaN
            end = "" if below == math.inf else f" and below {below}"
            raise argparse.ArgumentTypeError(f"must be a number of at least {low}{end}, but is {text}")
        return value

    number.__name__ = kind.__name__  # argparse says "invalid int value"
    return number


def core_numbers(text: str) -> tuple[int, ...]:
    """Returns the cores in a list such as 0,1,2."""
    from ..distributed.cores import available_cores  # torch takes seconds to import

    cores, here = tuple(int(core) for core in text.split(",")), available_cores()
    if not set(cores) <= set(here):
        raise argparse.ArgumentTypeError(f"this program may use the cores {','.join(map(str, here))}, not {text}")
    return cores
