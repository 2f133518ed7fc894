"""Cache shapes: which verification outcomes to prepare in a round.

Whatever the shape, the guesses after one accepted count are the draft's most likely tokens there. A shape only decides
how many there are: the *fan-out* F_k for each accepted count k and each row, which sum to the budget.
"""

import functools
import math
from abc import ABC, abstractmethod

import numpy as np

from ..config import SSDConfig
from ..theory import fan_out_for, geometric_fan_out
from .calibration import OnlineLogistic, log_odds
from .forks import Forks


def allocate(weights: list[float], budget: int) -> list[int]:
    """
    Shares whole numbers in proportion to the weights, by largest remainder.

    Args:
        weights (`list[float]`): Not negative, not all zero.
        budget (`int`): What the result sums to, exactly.
    """
    total = math.fsum(weights)
    shares = [budget * weight / total for weight in weights]
    result = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: (result[k] - shares[k], k))
    for k in by_remainder[: budget - sum(result)]:
        result[k] += 1
    return result


def chances_of_counts(acceptance: np.ndarray) -> np.ndarray:
    """
    Args:
        acceptance (`np.ndarray` of shape `(..., lookahead)`): Chance that each token is accepted if those before it
            were.

    Returns:
        `np.ndarray` of shape `(..., lookahead + 1)`: Chance P(k) that exactly k tokens are accepted.
    """
    chances = np.ones((*acceptance.shape[:-1], acceptance.shape[-1] + 1))
    np.cumprod(acceptance, axis=-1, out=chances[..., 1:])
    chances[..., :-1] -= chances[..., 1:]
    return chances


class CacheShape(ABC):
    """
    Decides how many bonus tokens to guess after each accepted count.

    Args:
        config (`SSDConfig`): Gives the priors.
    """

    def __init__(self, config: SSDConfig):
        self.config = config

    @abstractmethod
    def fan_outs(self, forks: Forks, budget: int) -> list[list[int]]:
        """
        Args:
            forks ([`Forks`]): The speculations that are being verified. With a lookahead of 0, as during the target's
                prefill, the only accepted count is 0.
            budget (`int`): Outcomes to prepare for each row.

        Returns:
            `list[list[int]]`: For each row, guesses after each of the `lookahead + 1` accepted counts.
        """

    def learn(self, forks: Forks, accepted: list[int], bonus: list[int]) -> None:
        """Sees how a round ended: accepted count (negative for a finished row) and bonus token of each row."""


class RowByRow(CacheShape):
    """A shape that looks at one row after the other."""

    @abstractmethod
    def fan_out(self, forks: Forks, row: int, budget: int) -> list[int]:
        """Returns the fan-out of one row whose speculation came from the draft model, which sums to the budget."""

    def fan_outs(self, forks, budget):
        if len(forks.limits) == 1:
            return [[budget]] * len(forks.from_backup)
        return [
            self.after_backup(forks, row, budget) if backup else self.fan_out(forks, row, budget)
            for row, backup in enumerate(forks.from_backup)
        ]

    def after_backup(self, forks: Forks, row: int, budget: int) -> list[int]:
        """
        A backup's token is accepted with about the probability that the draft model gives it, which is next to nothing
        for most: practically all of the budget goes to k = 0.
        """
        chances = np.maximum(chances_of_counts(forks.drafted_probabilities[row]), 0).tolist()
        return allocate(fan_out_for(chances, budget, self.config.power_law_exponent), budget)


class Uniform(RowByRow):
    """The same fan-out after each accepted count."""

    def fan_out(self, forks, row, budget):
        return allocate([1.0] * len(forks.limits), budget)


class Geometric(RowByRow):
    """Theorem 12: the best fan-out for a constant acceptance rate and a miss rate of F^-r."""

    def fan_out(self, forks, row, budget):
        a, r = self.config.acceptance_rate, self.config.power_law_exponent
        return allocate(geometric_fan_out(len(forks.limits) - 1, budget, a, r), budget)


class Explicit(RowByRow):
    """The user's own list, for speculations of the length it was made for; uniform for shorter ones."""

    def fan_out(self, forks, row, budget):
        given = self.config.fan_out
        return list(given) if len(given) == len(forks.limits) else allocate([1.0] * len(forks.limits), budget)


class AllAccepted(RowByRow):
    """
    What AMUSD and PEARL prepare: they go on drafting as if every token will be accepted, so that the only outcomes are
    K accepted tokens and a bonus token. Leaves out every rejection, after which they wait for a new speculation. (They
    guess one bonus token; here the budget says how many.)
    """

    def fan_out(self, forks, row, budget):
        return [0] * (len(forks.limits) - 1) + [budget]


class SingleBranch(RowByRow):
    """
    What SpecBranch prepares: one branching point, at the draft's least confident token, where the alternatives to it
    are prepared. Leaves out every other accepted count, also that of complete acceptance. (SpecBranch chooses the point
    by a learned predictor as well.)
    """

    def fan_out(self, forks, row, budget):
        least = int(forks.drafted_probabilities[row].argmin())
        return [budget * (k == least) for k in range(len(forks.limits))]


class GreedyTree(RowByRow):
    """
    What SwiftSpec prepares: a token tree grown from the current speculation, always by the node with the highest
    product of draft probabilities along its path. Leaves out how often the draft is right when it says so (no
    calibration), and that a bonus token before the end follows a rejection (no residual).
    """

    def fan_out(self, forks, row, budget):
        reached = np.append(1.0, forks.drafted_probabilities[row].cumprod())
        return _counts_of_best((reached[:, None] * forks.probabilities[row])[None], forks.limits, budget)[0]


class Confidence(CacheShape):
    """
    The budget goes to the outcomes that are most likely in this round: the chance of each accepted count, from the
    draft's own probability of each drafted token, times the chance of each bonus token there, from its probability
    among the tokens that remain and its rank. Logistic models make chances of these features: is a drafted token
    accepted (one for a backup's tokens), is a guess right after a rejection, is a guess right when everything was
    accepted. They learn from the rounds. They start from a draft that is accepted more often the surer it is, and whose
    guesses are right about as often as it says, the more likely the better they rank; this is better than Theorem 12's
    allocation from the start.
    """

    def __init__(self, config: SSDConfig):
        super().__init__(config)
        self.accepted = OnlineLogistic([float(log_odds(config.acceptance_rate)), 0.5])
        self.accepted_backup = OnlineLogistic([0.0, 1.0])
        self.right_after_rejection = OnlineLogistic([0.5, 0.8, -0.5])
        self.right_at_the_end = OnlineLogistic([0.5, 0.8, -0.5])

    def fan_outs(self, forks, budget):
        if len(forks.limits) == 1:
            return [[budget]] * len(forks.from_backup)
        odds, is_backup = forks.drafted_log_odds, np.array(forks.from_backup)[:, None]
        counts = chances_of_counts(np.where(is_backup, self.accepted_backup(odds), self.accepted(odds)))
        guesses, ranks = forks.log_chances, _log_ranks(forks.probabilities.shape[2])
        right = self.right_after_rejection(guesses, ranks)
        right[:, -1] = self.right_at_the_end(guesses[:, -1], ranks)
        return _counts_of_best(counts[:, :, None] * right, forks.limits, budget)

    def learn(self, forks, accepted, bonus):
        lookahead, tokens = len(forks.limits) - 1, forks.guesses
        odds, guesses, ranks = forks.drafted_log_odds, forks.log_chances, _log_ranks(tokens.shape[2])
        seen = {}  # by model: what happened, and its features, of each row that is not finished
        for row, (k, token) in enumerate(zip(accepted, bonus)):
            if k >= 0:
                model, tested = self.accepted_backup if forks.from_backup[row] else self.accepted, min(k + 1, lookahead)
                seen.setdefault(model, []).append((np.arange(tested) < k, odds[row, :tested]))
                model = self.right_at_the_end if k == lookahead else self.right_after_rejection
                seen.setdefault(model, []).append((tokens[row, k] == token, guesses[row, k], ranks))
        for model, rows in seen.items():
            model.learn(*(np.concatenate(of_rows) for of_rows in zip(*rows)))


@functools.cache
def _log_ranks(guesses: int) -> np.ndarray:
    return np.log(np.arange(1, guesses + 1))


def _counts_of_best(chances: np.ndarray, limits: list[int], budget: int) -> list[list[int]]:
    """
    Returns how many of the `budget` most likely outcomes of each row of `(batch_size, lookahead + 1, guesses)` have
    each accepted count.
    """
    guesses, budget = chances.shape[2], min(budget, sum(limits))
    possible = np.arange(guesses) < np.array(limits)[:, None]
    flat = np.where(possible, chances, -1.0).reshape(len(chances), -1)
    best = np.argsort(-flat, axis=1, kind="stable")[:, :budget] // guesses
    return [np.bincount(row, minlength=len(limits)).tolist() for row in best]


SHAPES = {
    "uniform": Uniform,
    "geometric": Geometric,
    "confidence": Confidence,
    "all_accepted": AllAccepted,
    "single_branch": SingleBranch,
    "greedy_tree": GreedyTree,
}


def shape_for(config: SSDConfig) -> CacheShape:
    """Returns a new cache shape of the kind that the config names."""
    return SHAPES[config.fan_out](config) if isinstance(config.fan_out, str) else Explicit(config)
