"""Which parameters of a test are tried in the quick suite, and which in the slow one alone."""

import functools

import pytest

slowly = functools.partial(pytest.param, marks=pytest.mark.slow)


def quick_first(parameters, count: int = 1) -> list:
    """Returns all of them, of which the first ones are tried in the quick suite. A tuple is several arguments."""
    parameters = [*parameters]
    rest = [one if isinstance(one, tuple) else (one,) for one in parameters[count:]]
    return [*parameters[:count], *(slowly(*one) for one in rest)]
