"""How fast the machine is just now, told apart from how long different things take."""

import math
from collections.abc import Hashable

import numpy as np

NOISE = 0.1  # standard deviation of the logarithm of one duration
WANDERING, LASTING = 0.2, 40.0  # ... of the pace over a long time; seconds in which it forgets most of what it was
CHANGE = 0.003  # ... of how much what is particular to a kind changes from one round to the next
MOST_KINDS = 32  # that are known at a time; the draft may feed any number of tokens after a rest
SURPRISE = 4.0  # standard deviations beyond which a duration is a hiccup, and counts for no more than that


class Pace:
    """
    A machine that has other things to do is slower for a while, whatever is asked of it. What was measured in such a
    while, of a kind of round that is seen once in a hundred, must not be compared with what other kinds took later. So
    the logarithm of a duration is taken to be the sum of the machine's pace, which wanders, of what is particular to
    its kind, which stays, and of noise; all are estimated together, by a Kalman filter. Where a kind follows another
    one, the pace is about what it was, and the difference tells the kinds apart.
    """

    def __init__(self):
        self.places: dict[Hashable, int] = {}  # of each kind, the last seen last; the pace comes first
        self.mean, self.covariance = np.zeros(1), np.full((1, 1), WANDERING**2)
        self.rounds, self.seconds = 0, 0.0  # that went by since then

    def advance(self, seconds: float) -> None:
        """A round goes by, which took so long."""
        self.rounds, self.seconds = self.rounds + 1, self.seconds + seconds

    def observe(self, kind: Hashable, seconds: float) -> None:
        """
        Args:
            kind (`Hashable`): What took so long. Durations of one kind are alike but for the pace and noise.
            seconds (`float`): How long.
        """
        self._catch_up()
        if kind not in self.places and len(self.places) == MOST_KINDS:
            self._forget(next(iter(self.places)))
        value, known = math.log(seconds), len(self.mean)
        if kind not in self.places:  # it tells nothing of the pace, and with it all that is known of the kind
            self.places[kind] = known
            self.mean = np.append(self.mean, value - self.mean[0])
            self.covariance = np.pad(self.covariance, (0, 1))
            self.covariance[known] = -self.covariance[0]
            self.covariance[:, known] = self.covariance[known]
            self.covariance[known, known] = self.covariance[0, 0] + NOISE**2
            return
        place = self.places[kind] = self.places.pop(kind)
        towards = self.covariance[0] + self.covariance[place]
        variance = float(towards[0] + towards[place]) + NOISE**2
        most = SURPRISE * variance**0.5
        surprise = min(most, max(-most, value - float(self.mean[0] + self.mean[place])))
        self.mean += towards * (surprise / variance)
        self.covariance -= np.multiply.outer(towards, towards / variance)

    def _forget(self, kind: Hashable) -> None:
        """Leaves a kind out, as if it had never been seen."""
        place = self.places.pop(kind)
        self.mean = np.delete(self.mean, place)
        self.covariance = np.delete(np.delete(self.covariance, place, axis=0), place, axis=1)
        self.places = {other: where - (where > place) for other, where in self.places.items()}

    def _catch_up(self) -> None:
        """Lets the pace go back towards usual, and what is known fade, for the rounds that went by."""
        if self.rounds:
            kept = math.exp(-self.seconds / LASTING)
            self.mean[0] *= kept
            self.covariance[0] *= kept
            self.covariance[:, 0] *= kept
            variances = self.covariance.ravel()[:: len(self.mean) + 1]  # a view of the diagonal
            variances += CHANGE**2 * self.rounds
            variances[0] += WANDERING**2 * (1 - kept**2) - CHANGE**2 * self.rounds
            self.rounds, self.seconds = 0, 0.0

    @property
    def factor(self) -> float:
        """By how much everything takes longer just now than usual."""
        return math.exp(self.mean[0] * math.exp(-self.seconds / LASTING))
