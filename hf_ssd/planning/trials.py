"""Chooses between a few values of a setting by trying each of them and comparing tokens per second."""

from ..rounds import PLAIN, RoundRecord
from .estimates import Average

TRIAL_ROUNDS = 24  # in which a value is tried


class Trials:
    """Tries values in turn and stays with the value that gave the most tokens per second."""

    def __init__(self, values: tuple[float, ...]):
        self.speeds = {value: Average(0.0, 0.0, memory=0.7) for value in values}
        self.value, self.trials, self.rounds, self.tokens, self.seconds = values[0], 0, 0, 0, 0.0

    def observe(self, before: RoundRecord, now: RoundRecord) -> None:
        if now.mode == PLAIN or not before.received_at:
            return
        self.rounds += 1
        self.tokens += sum(before.accepted[row] + 1 for row in before.live)
        self.seconds += now.received_at - before.received_at
        if self.rounds < TRIAL_ROUNDS:
            return
        self.speeds[self.value].observe(self.tokens / self.seconds)
        self.rounds, self.tokens, self.seconds, self.trials = 0, 0, 0.0, self.trials + 1
        values = list(self.speeds)
        unknown = [value for value, speed in self.speeds.items() if not speed.weight]
        best = max((value for value in values if value not in unknown), key=lambda value: self.speeds[value].value)
        self.value = unknown[0] if unknown else best
        if not unknown and self.trials % 8 == 0:  # a neighbour may have become better
            self.value = values[(values.index(best) + (1 if self.trials % 16 else -1)) % len(values)]
