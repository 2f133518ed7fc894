"""How often an outcome is among those that were prepared."""

import numpy as np

from ..config import SSDConfig
from .costs import Average, Frequencies
from .planner import BACKUPS, GUESSES, Round

LARGEST_BUDGET = 48
EVERY = 3  # rounds between two that are compared with what was predicted, which takes a while


class HitRates:
    """
    Hit rates by budget follow from how often the draft's first guess of a bonus token is right, and its second, and so
    on, and from how often so many tokens are accepted; corrected by how that has erred so far.

    Args:
        config (`SSDConfig`): Gives the priors.
    """

    def __init__(self, config: SSDConfig):
        # The power law's differences.
        law = [(rank + 1) ** -config.power_law_exponent for rank in range(GUESSES + 1)]
        chances = [law[rank] - law[rank + 1] for rank in range(GUESSES)]
        self.after_rejection, self.at_the_end = Frequencies(chances, 4.0), Frequencies(chances, 4.0)
        self.misses_over_predicted, self.rounds = Average(1.0, 4.0, memory=0.97), 0
        self.overall, self.after_backup = Average(0.5, 1.0), Average(0.3, 8.0)

    def observe(self, round_: Round, acceptance: list[float]) -> None:
        """
        Learns from a round for which outcomes had been prepared.

        Args:
            round_ ([`~hf_ssd.speculation.planner.Round`]): The round.
            acceptance (`list[float]`): Chance of acceptance of each of its drafted tokens.
        """
        live = [row for row, k in enumerate(round_.accepted) if k >= 0]
        for row in live:
            is_backup = round_.sources[row] in BACKUPS
            (self.after_backup if is_backup else self.overall).observe(round_.hits[row])
            if not is_backup:
                rejected = round_.accepted[row] < round_.lookahead
                (self.after_rejection if rejected else self.at_the_end).observe(round_.ranks[row])
        self.rounds += bool(live)
        if live and self.rounds % EVERY == 0:
            hits = sum(round_.hits[row] for row in live) / len(live)
            predicted = self.predicted(acceptance)[min(round_.budget, LARGEST_BUDGET) - 1]
            self.misses_over_predicted.observe(min(3.0, (1 - hits) / max(0.02, 1 - predicted)))

    def predicted(self, acceptance: list[float]) -> list[float]:
        """
        Args:
            acceptance (`list[float]`): Chance of acceptance of each drafted token.

        Returns:
            The hit rate if the best 1, 2, ... outcomes of such a speculation are prepared, as far as averages tell.
        """
        rates = np.array(acceptance)
        reached = np.cumprod(np.append(1.0, rates))
        rejected = np.multiply.outer(reached[:-1] * (1 - rates), self.after_rejection.values)
        chances = np.append(rejected, reached[-1] * self.at_the_end.values)
        best = -np.sort(-chances)[:LARGEST_BUDGET]
        total = np.minimum(1.0, np.cumsum(best)).tolist()
        return total + total[-1:] * (LARGEST_BUDGET - len(total))

    def corrected(self, budget: int, predicted: list[float]) -> float:
        """Returns what averages tell of a budget, corrected by how they erred so far."""
        missed = (1 - predicted[min(budget, len(predicted)) - 1]) * min(1.5, max(0.7, self.misses_over_predicted.value))
        return max(0.0, 1 - missed)
