"""Picks one of a few values by trying them."""

import time

from .costs import Average
from .planner import Round

ROUNDS_PER_TRIAL = 24


class Ladder:
    """Tries values in turn and stays with the one that gave the most tokens per second."""

    def __init__(self, values: tuple[float, ...]):
        self.speeds = {value: Average(0.0, 0.0, memory=0.7) for value in values}
        self.value, self.trials, self.rounds, self.tokens, self.seconds = values[0], 0, 0, 0, 0.0
        self.now = time.perf_counter()

    def observe(self, round_: Round) -> bool:
        """Counts a round, and tells whether another value is to be tried now."""
        began, self.now = self.now, time.perf_counter()
        if round_.lookahead == 0:
            return False
        elapsed = self.now - began
        self.rounds += 1
        self.tokens += sum(k + 1 for k in round_.accepted if k >= 0)
        self.seconds += min(elapsed, 5 * round_.seconds) if round_.seconds else elapsed  # no pauses between calls
        if self.rounds < ROUNDS_PER_TRIAL:
            return False
        self.speeds[self.value].observe(self.tokens / self.seconds)
        self.rounds, self.tokens, self.seconds = 0, 0, 0.0
        self.trials += 1
        before, values = self.value, list(self.speeds)
        unknown = [value for value, speed in self.speeds.items() if not speed.weight]
        best = max((value for value in values if value not in unknown), key=lambda value: self.speeds[value].value)
        self.value = unknown[0] if unknown else best
        if not unknown and self.trials % 8 == 0:  # look again at a neighbour, now and then
            self.value = values[(values.index(best) + (1 if self.trials % 16 else -1)) % len(values)]
        return self.value != before
