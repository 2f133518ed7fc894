"""Cache shapes: how many guesses of the bonus token, the *fan-out* F_k, to prepare after each accepted count k."""

import functools
import math
from abc import ABC, abstractmethod

import numpy as np

from ..config import SSDConfig
from ..theory import fan_out_for, geometric_fan_out
from .outcome_candidates import OutcomeCandidates, log_odds

CANDIDATES = 32  # bonus tokens that are ranked after each accepted count
LEARNING_RATE = 0.3  # of logistic models


def allocate(weights: list[float], budget: int) -> list[int]:
    """Shares whole numbers of sum `budget` in proportion to weights, not all zero, by largest remainder."""
    total = math.fsum(weights)
    shares = [budget * weight / total for weight in weights]
    result = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: (result[k] - shares[k], k))
    for k in by_remainder[: budget - sum(result)]:
        result[k] += 1
    return result


@functools.lru_cache
def best_fan_out(lookahead: int, budget: int, acceptance_rate: float, power_law_exponent: float) -> list[int]:
    """Theorem 12: the best fan-out for a constant acceptance rate and a miss rate of F^-r."""
    return allocate(geometric_fan_out(lookahead, budget, acceptance_rate, power_law_exponent), budget)


def chances_of_counts(acceptance: np.ndarray) -> np.ndarray:
    """Returns the chances `(..., lookahead + 1)` that exactly k tokens are accepted. See [`CacheShape.covered`]."""
    chances = np.ones((*acceptance.shape[:-1], acceptance.shape[-1] + 1))
    np.cumprod(acceptance, axis=-1, out=chances[..., 1:])
    chances[..., :-1] -= chances[..., 1:]
    return chances


class CacheShape(ABC):
    """Decides how many bonus tokens to guess after each accepted count. The config gives the priors."""

    def __init__(self, config: SSDConfig):
        self.config = config

    @abstractmethod
    def fan_outs(self, candidates: OutcomeCandidates, budget: int) -> list[list[int]]:
        """Returns each row's guesses after each of the `lookahead + 1` accepted counts, of sum `budget`."""
        # With a lookahead of 0, as during the target's prefill, the only accepted count is 0.

    @abstractmethod
    def covered(self, acceptance: np.ndarray, after_rejection: np.ndarray, at_the_end: np.ndarray, budgets) -> list:
        """Returns the chance mass of the outcomes that are prepared with each budget, for the planner."""
        # Means of many rounds: the chance that each drafted token `(lookahead,)` is accepted if all before it were, and
        # that each guess `(CANDIDATES,)`, the best first, is the bonus token.

    def learn(self, candidates: OutcomeCandidates, accepted: list[int], bonus: list[int]) -> None:
        """Learns from the end of a round: accepted count (negative for a finished row) and bonus token of each row."""


class RowByRow(CacheShape):
    """A shape that depends on the drafted tokens alone, and chooses the fan-out of each row separately."""

    @abstractmethod
    def fan_out(self, acceptance: np.ndarray, budget: int) -> list[int]:
        """Returns the fan-out of a row, of sum `budget`, by the draft's probability of each drafted token."""

    def fan_outs(self, candidates, budget):
        if len(candidates.limits) == 1:
            return [[budget]] * len(candidates.from_fallback)
        rows = zip(candidates.drafted_probabilities, candidates.from_fallback)
        return [self._after_fallback(row, budget) if fallback else self.fan_out(row, budget) for row, fallback in rows]

    def _after_fallback(self, acceptance: np.ndarray, budget: int) -> list[int]:
        # The target accepts a fallback's tokens with about the draft's probability, so k = 0 gets most of the budget.
        chances = np.maximum(chances_of_counts(acceptance), 0).tolist()
        return allocate(fan_out_for(chances, budget, self.config.power_law_exponent), budget)

    def covered(self, acceptance, after_rejection, at_the_end, budgets):
        chances = outcome_chances(acceptance, after_rejection, at_the_end)
        within = np.pad(chances.cumsum(axis=1), ((0, 0), (1, 0)))
        counts = [np.minimum(self.fan_out(acceptance, budget), chances.shape[1]) for budget in budgets]
        return [float(within[np.arange(len(within)), count].sum()) for count in counts]


def outcome_chances(acceptance: np.ndarray, after_rejection: np.ndarray, at_the_end: np.ndarray) -> np.ndarray:
    """Returns the chance of each outcome, of shape `(lookahead + 1, CANDIDATES)`. See [`CacheShape.covered`]."""
    counts = chances_of_counts(acceptance)
    return np.concatenate([np.multiply.outer(counts[:-1], after_rejection), counts[-1:, None] * at_the_end])


class Uniform(RowByRow):
    """The same fan-out after each accepted count."""

    def fan_out(self, acceptance, budget):
        return allocate([1.0] * (len(acceptance) + 1), budget)


class Geometric(RowByRow):
    """The fan-out of Theorem 12."""

    def fan_out(self, acceptance, budget):
        return best_fan_out(len(acceptance), budget, self.config.acceptance_rate, self.config.power_law_exponent)


class Explicit(Uniform):
    """The user's own list, for speculations of the length that it was made for; uniform for other lengths."""

    def fan_out(self, acceptance, budget):
        given = self.config.fan_out
        return list(given) if len(given) == len(acceptance) + 1 else super().fan_out(acceptance, budget)


class OnlineLogistic:
    """Estimates the chance of an event, of whose inputs the first is a constant 1, by AdaGrad (Duchi et al., 2011)."""

    def __init__(self, weights: list[float]):
        self.weights, self.squares = np.array(weights), np.ones(len(weights))  # numpy is fast for so few numbers

    def __call__(self, *inputs: np.ndarray) -> np.ndarray:
        score = self.weights[0] + sum(w * x for w, x in zip(self.weights[1:], inputs))
        return 0.5 + 0.5 * np.tanh(0.5 * score)  # the logistic function in a form that does not overflow

    def learn(self, happened: np.ndarray, *inputs: np.ndarray) -> None:
        """Takes a single step for all events. `happened` and each of the inputs have shape `(events,)`."""
        if len(happened):
            error = self(*inputs) - happened
            gradient = np.array([error.sum(), *(error @ x for x in inputs)])
            self.squares += gradient**2
            self.weights -= LEARNING_RATE * gradient / np.sqrt(self.squares)


class Confidence(CacheShape):
    """
    The budget goes to the most likely outcomes of the round. Their chances are estimated from the draft's probabilities
    of the drafted tokens, and of the bonus token among the tokens that remain, and from its rank. Four logistic models
    learn from every round. Their first weights say that guesses are right about as often as their probabilities.
    """

    def __init__(self, config: SSDConfig):
        super().__init__(config)
        self.accepted = OnlineLogistic([float(log_odds(config.acceptance_rate)), 0.5, 1.0])
        self.accepted_fallback = OnlineLogistic([0.0, 1.0, 1.0])
        self.right_after_rejection = OnlineLogistic([0.5, 0.8, -0.5])
        self.right_at_the_end = OnlineLogistic([0.5, 0.8, -0.5])

    def fan_outs(self, candidates, budget):
        chances, limits = self.chances(candidates), candidates.limits
        possible = np.arange(chances.shape[2]) < np.array(limits)[:, None]
        flat = np.where(possible, chances, -1.0).reshape(len(chances), -1)
        best = np.argsort(-flat, axis=1, kind="stable")[:, : min(budget, sum(limits))] // chances.shape[2]
        return [np.bincount(row, minlength=len(limits)).tolist() for row in best]

    def covered(self, acceptance, after_rejection, at_the_end, budgets):
        mass = np.cumsum(-np.sort(-outcome_chances(acceptance, after_rejection, at_the_end).ravel()))
        return [float(mass[min(budget, len(mass)) - 1]) for budget in budgets]

    def chances(self, candidates: OutcomeCandidates) -> np.ndarray:
        """Returns how likely each candidate is, of shape `(batch_size, lookahead + 1, candidates)`."""
        seen, is_fallback = (candidates.drafted_log_odds, candidates.luck), np.array(candidates.from_fallback)[:, None]
        counts = chances_of_counts(np.where(is_fallback, self.accepted_fallback(*seen), self.accepted(*seen)))
        guesses, ranks = candidates.log_odds, np.log(np.arange(1, 1 + candidates.chances.shape[2]))
        right = self.right_after_rejection(guesses, ranks)
        right[:, -1] = self.right_at_the_end(guesses[:, -1], ranks)
        return counts[:, :, None] * right

    def learn(self, candidates, accepted, bonus):
        lookahead, tokens = len(candidates.limits) - 1, candidates.guesses
        odds, luck = candidates.drafted_log_odds, candidates.luck
        guesses, ranks = candidates.log_odds, np.log(np.arange(1, 1 + tokens.shape[2]))
        seen = {}  # for each model, the events of the rows that are not finished: whether they happened, and inputs
        for row, (k, token) in enumerate(zip(accepted, bonus)):
            if k >= 0:
                model = self.accepted_fallback if candidates.from_fallback[row] else self.accepted
                tested = min(k + 1, lookahead)
                seen.setdefault(model, []).append((np.arange(tested) < k, odds[row, :tested], luck[row, :tested]))
                model = self.right_at_the_end if k == lookahead else self.right_after_rejection
                seen.setdefault(model, []).append((tokens[row, k] == token, guesses[row, k], ranks))
        for model, rows in seen.items():
            model.learn(*(np.concatenate(of_rows) for of_rows in zip(*rows)))


SHAPES = {
    "uniform": Uniform,
    "geometric": Geometric,
    "confidence": Confidence,
}


def shape_for(config: SSDConfig) -> CacheShape:
    return SHAPES[config.fan_out](config) if isinstance(config.fan_out, str) else Explicit(config)
