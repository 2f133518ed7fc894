"""Running estimates from round to round: means, lines and hit rates that forget old observations."""

import math

import numpy as np

from ..config import SSDConfig
from ..drafting.cache_shapes import CANDIDATES, shape_for
from ..rounds import BY_TARGET, RoundRecord

RELATIVE_SLOPE = 0.02  # guess while all observations have the same size: cost of a token over the fixed part
LARGEST_SURPRISE = 3.0  # times the expected duration, at which a longer duration is cut: the machine had a hiccup
PLACES = 16  # of tokens whose acceptance is counted apart
PRIOR_TOKENS = 4.0  # proposed tokens that the config's acceptance rate counts like


class Average:
    """A mean of numbers or arrays, in which each observation leaves earlier observations `memory` of their weight."""

    def __init__(self, prior=0.0, weight: float = 0.0, memory: float = 0.99):
        self.memory, self.weight, self.total = memory, weight, prior * weight

    def observe(self, value) -> None:
        self.weight = self.memory * self.weight + 1
        self.total = self.memory * self.total + value

    def restart(self, value, weight: float) -> None:
        self.weight, self.total = weight, value * weight

    @property
    def value(self):
        return self.total / self.weight if self.weight else 0.0


class Line:
    """Seconds = fixed + slope * units, by least squares, or with a guessed slope while all sizes are the same."""

    def __init__(self, guess: float = RELATIVE_SLOPE, like: "Line | None" = None, smaller: "Line | None" = None):
        # The slope of the same cost for `smaller` numbers of units, or that of a cost `like` it, goes before `guess`.
        self.guess, self.like, self.smaller = guess, like, smaller
        self.forget()

    def forget(self) -> None:
        # The level forgets within some 30 observations, because a machine may be slower for a while.
        self.units, self.seconds = Average(memory=0.97), Average(memory=0.97)
        self.moments = Average(np.zeros(4), memory=0.999)  # units, seconds, units squared, units times seconds
        self.count = self.fixed = self.slope = 0.0

    def observe(self, units: float, seconds: float) -> None:
        if self.count > 3:
            seconds = min(seconds, LARGEST_SURPRISE * max(self(units), self.seconds.value))
        self.count += 1
        self.units.observe(units)
        self.seconds.observe(seconds)
        self.moments.observe(np.array([units, seconds, units * units, units * seconds]))
        mean_x, mean_y, mean_xx, mean_xy = self.moments.value.tolist()
        variance = max(0.0, mean_xx - mean_x**2)
        covariance = mean_xy - mean_x * mean_y
        relative = self.guess if self.like is None else self.like.relative_slope
        guess = relative * mean_y / (1 + relative * mean_x)
        if self.smaller is not None and self.smaller.count and mean_x > self.smaller.units.value:
            guess = (mean_y - self.smaller.seconds.value) / (mean_x - self.smaller.units.value)
        certainty = 0.2 * (mean_x**2 + 1) / self.moments.weight  # the guess counts like a few observations
        slope = max(0.0, (covariance + certainty * guess) / (variance + certainty))
        self.slope = min(slope, self.seconds.value / max(self.units.value, 1e-9))
        self.fixed = max(0.0, self.seconds.value - self.slope * self.units.value)

    @property
    def relative_slope(self) -> float:
        return min(1.0, self.slope / self.fixed) if self.fixed > 0 else self.guess

    def __call__(self, units: float) -> float:
        """Returns the expected seconds, 0 before the first observation."""
        return self.fixed + self.slope * units


class Acceptance:
    """By place in a proposal, how often its token is right if the tokens before it are."""

    def __init__(self, memory: float):
        self.places = [Average(memory=memory) for _ in range(PLACES)]

    def observe(self, accepted: int, proposed: int) -> None:
        for place in range(min(accepted + 1, proposed, PLACES)):  # the rest was not tested
            self.places[place].observe(place < accepted)

    def rates(self, count: int, prior: float) -> list[float]:
        """Returns the first `count` rates, where little was tested near the mean of all, which begins at the prior."""
        tested = math.fsum(place.weight for place in self.places) + PRIOR_TOKENS
        mean = (math.fsum(place.total for place in self.places) + PRIOR_TOKENS * prior) / tested
        rates = [(place.total + 2 * PRIOR_TOKENS * mean) / (place.weight + 2 * PRIOR_TOKENS)
                 for place in self.places[:count]]  # fmt: skip
        return rates + [mean] * (count - len(rates))


class EarlyRates:
    """How often a row has early tokens (`share`), and how often they are right (`acceptance`)."""

    def __init__(self, memory: float):
        self.share, self.acceptance = Average(0.5, 2.0), Acceptance(memory)

    def observe(self, given: int, gained: int) -> None:
        """Learns how many early tokens a row gained, bonus token included, 0 without any."""
        self.share.observe(given > 0)
        self.acceptance.observe(given - 1, gained)


class HitRates:
    """Hit rates: the probability that the cache shape covers, corrected by the share of outcomes that were prepared."""

    def __init__(self, config: SSDConfig):
        self.shape, r = shape_for(config), config.power_law_exponent
        law = np.arange(1, CANDIDATES + 2) ** -r  # the chance to miss with a fan-out of F is F^-r (Theorem 12)
        # How often the bonus token is each of the draft's guesses, after a rejection and after complete acceptance.
        self.ranks = {is_rejection: Average(law[:-1] - law[1:], 4.0) for is_rejection in (True, False)}
        self.misses_over_expected = Average(1.0, 8.0, memory=0.97)

    def observe(self, before: RoundRecord, now: RoundRecord, acceptance) -> None:
        """Learns from the rows of a round whose outcomes were drafted; `acceptance` gives rates by lookahead."""
        drafted = [row for row in before.live if before.sources[row] not in BY_TARGET]
        for row in drafted:
            is_rejection = before.of_chain(row) < before.proposed(row)
            self.ranks[is_rejection].observe(np.arange(CANDIDATES) == now.ranks[row])
        asked = [row for row in drafted if not now.is_early(row)]
        if asked:
            share = sum(now.hits[row] for row in asked) / len(asked)
            self.observe_hits(share, acceptance(max(before.proposed(row) for row in asked)), now.budget)

    def observe_hits(self, share: float, acceptance: list[float], budget: int) -> None:
        """Learns the share of the rows that hit, in proportion to the share that the shape was expected to cover."""
        expected = self.covered(acceptance, [budget])[0]
        self.misses_over_expected.observe(min(3.0, (1 - share) / max(0.05, 1 - expected)))

    def covered(self, acceptance: list[float], budgets) -> list[float]:
        return self.shape.covered(np.array(acceptance), self.ranks[True].value, self.ranks[False].value, budgets)

    def __call__(self, acceptance: list[float], budgets) -> list[float]:
        """Returns the expected hit rate of a row for each budget, at these chances of acceptance."""
        missed = min(3.0, max(0.5, self.misses_over_expected.value))
        return [min(1.0, max(0.0, 1 - (1 - mass) * missed)) for mass in self.covered(acceptance, budgets)]
