"""How fast the machine is just now, told apart from how long different things take."""

import math
from collections.abc import Hashable

import numpy as np

from .costs import Average

NOISE = 0.1  # standard deviation of the logarithm of one duration
WANDERING, LASTING = 0.2, 40.0  # ... of the pace over a long time; seconds in which it forgets most of what it was
CHANGE = 0.004  # ... of how much what is particular to a kind changes within a second
MOST_KINDS = 32  # that are known at a time; the draft may feed any number of tokens after a rest
SURPRISE = 4.0  # standard deviations beyond which a duration is a hiccup, and counts for no more than that


class Pace:
    """
    A machine that has other things to do is slower for a while, whatever is asked of it. What was measured in such a
    while, of a kind of round that is seen once in a hundred, must not be compared with what other kinds took later. So
    the logarithm of a duration is taken to be the sum of the machine's pace, which wanders, of what is particular to
    its kind, which stays, and of noise; all are estimated together, by a Kalman filter. Where a kind follows another
    one, the pace is about what it was, and the difference tells the kinds apart. What is usual is an average over about
    as long as a pace lasts. The pace goes back to that, and not to some constant: otherwise a slow spell of many rounds
    would end up in the kind that was seen in it.
    """

    def __init__(self):
        self.places: dict[Hashable, int] = {}  # of each kind, the last seen last; the pace comes first
        self.mean, self.covariance = np.zeros(1), np.zeros((1, 1))  # paces are told in units of the first
        self.seconds = self.unseen = 0.0  # that went by since then, and since something was observed
        self.average = Average(0.0, 0.0, memory=1.0)  # of the logarithm of the pace, by time

    def advance(self, seconds: float) -> None:
        """A round goes by, which took so long."""
        self.seconds, self.unseen = self.seconds + seconds, self.unseen + seconds

    def observe(self, kind: Hashable, seconds: float) -> None:
        """
        Args:
            kind (`Hashable`): What took so long. Durations of one kind are alike but for the pace and noise.
            seconds (`float`): How long.
        """
        self._catch_up()
        self._observe_usual()
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
        if self.seconds:
            kept = math.exp(-self.seconds / LASTING)
            self.mean[0] = self.average.value + kept * (self.mean[0] - self.average.value)
            self.covariance[0] *= kept
            self.covariance[:, 0] *= kept
            variances = self.covariance.ravel()[:: len(self.mean) + 1]  # a view of the diagonal
            variances += CHANGE**2 * self.seconds
            variances[0] += WANDERING**2 * (1 - kept**2) - CHANGE**2 * self.seconds
            self.seconds = 0.0

    def _observe_usual(self) -> None:
        """What was not seen for long is counted as if it had been seen for a second."""
        share = 1 - math.exp(-min(self.unseen, 1.0) / LASTING)
        self.average.fade(1 - share)
        self.average.observe(float(self.mean[0]), share)
        self.unseen = 0.0

    @property
    def factor(self) -> float:
        """By how much everything takes longer just now than at first."""
        usual = self.average.value
        return math.exp(usual + (self.mean[0] - usual) * math.exp(-self.seconds / LASTING))

    @property
    def usual(self) -> float:
        """The same for as long as a pace lasts."""
        return math.exp(self.average.value)
