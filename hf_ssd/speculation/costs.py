"""What things cost: seconds as a linear function of how much there is to do, learned while it is done."""

import numpy as np


class LinearCost:
    """
    Seconds = fixed + slope * units, by least squares that forget. A machine may be slower for a while, but what more
    units cost remains much the same; so the slope is remembered longer than the level. Where all observations are of
    one size, the slope is a guess.

    Args:
        relative_slope (`float`): The guess, in units of the fixed part.
        memory (`float`, *optional*, defaults to 0.97): Weight that an observation keeps with each one that follows, for
            the level.
        slope_memory (`float`, *optional*, defaults to 0.999): The same for the slope.

    Attributes:
        like (`LinearCost`, *optional*): Another cost whose slope is about the same share of its fixed part: what is
            known of that is a better guess.
    """

    def __init__(self, relative_slope: float, memory: float = 0.97, slope_memory: float = 0.999):
        self.guess, self.slope_memory = relative_slope, slope_memory
        self.like: LinearCost | None = None
        self.observations = 0
        self.units, self.seconds = Average(0.0, 0.0, memory), Average(0.0, 0.0, memory)
        self.weight = self.x = self.y = self.xx = self.xy = 0.0
        self.fixed = self.slope = 0.0

    def observe(self, units: float, seconds: float) -> None:
        if self.observations > 5:  # one hiccup of the machine must not change the plan
            seconds = min(seconds, 3 * max(self(units), self.seconds.value))
        self.observations += 1
        self.units.observe(units)
        self.seconds.observe(seconds)
        self.weight = self.slope_memory * self.weight + 1
        self.x = self.slope_memory * self.x + units
        self.y = self.slope_memory * self.y + seconds
        self.xx = self.slope_memory * self.xx + units * units
        self.xy = self.slope_memory * self.xy + units * seconds
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        variance = max(0.0, self.xx / self.weight - mean_x**2)
        covariance = self.xy / self.weight - mean_x * mean_y
        relative = self.guess if self.like is None else self.like.relative_slope
        guess = relative * mean_y / (1 + relative * mean_x)
        certainty = 0.2 * (mean_x**2 + 1) / self.weight  # the guess counts like a few observations near each other
        slope = max(0.0, (covariance + certainty * guess) / (variance + certainty))
        self.slope = min(slope, self.seconds.value / max(self.units.value, 1e-9))
        self.fixed = self.seconds.value - self.slope * self.units.value

    @property
    def relative_slope(self) -> float:
        """The slope as a share of the fixed part."""
        return min(1.0, self.slope / self.fixed) if self.fixed > 0 else self.guess

    def fade(self, share: float) -> None:
        """Leaves this share of the weight of what is known of the level. The slope remains."""
        self.units.fade(share)
        self.seconds.fade(share)

    def __call__(self, units: float) -> float:
        """Returns the estimated seconds; 0 before the first observation."""
        return self.fixed + self.slope * units


class Average:
    """
    A mean that forgets.

    Args:
        prior (`float`): Where it starts.
        weight (`float`): How many observations the start counts for.
        memory (`float`, *optional*, defaults to 0.99): Weight that an observation keeps with each one that follows.
    """

    def __init__(self, prior: float, weight: float, memory: float = 0.99):
        self.memory = memory
        self.restart(prior, weight)

    def restart(self, prior: float, weight: float) -> None:
        """Forgets everything and starts there, as if from so many observations."""
        self.weight, self.total = weight, prior * weight

    def observe(self, value: float, weight: float = 1.0) -> None:
        self.weight = self.memory * self.weight + weight
        self.total = self.memory * self.total + weight * value

    def fade(self, share: float) -> None:
        """Leaves this share of the weight of what was observed."""
        self.weight *= share
        self.total *= share

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0


class Frequencies:
    """
    How often each of several things happens, of which at most one does. Forgets like an [`Average`].

    Args:
        priors (`list[float]`): The chance of each.
        weight (`float`): How many observations those count for.
        memory (`float`, *optional*, defaults to 0.99): Weight that an observation keeps with each one that follows.
    """

    def __init__(self, priors: list[float], weight: float, memory: float = 0.99):
        self.memory, self.weight, self.totals = memory, weight, np.array(priors) * weight

    def observe(self, which: int | None) -> None:
        """Learns which of them happened, `None` for none."""
        self.weight = self.memory * self.weight + 1
        self.totals *= self.memory
        if which is not None and which < len(self.totals):
            self.totals[which] += 1

    @property
    def values(self) -> np.ndarray:
        return self.totals / self.weight
