"""Probabilities that learn from what really happens: logistic regression, one observation at a time."""

import torch


class OnlineLogistic:
    """
    Estimates the chance of an event from features, and learns from each event with AdaGrad (Duchi et al., 2011). On the
    CPU, where a handful of numbers costs microseconds.

    Args:
        weights (`list[float]`): Where to start, the first one for the constant feature 1.
        learning_rate (`float`, *optional*, defaults to 0.3): Largest first step of a weight.
    """

    def __init__(self, weights: list[float], learning_rate: float = 0.3):
        self.weights = torch.tensor(weights)
        self.learning_rate = learning_rate
        self.squares = torch.ones(len(weights))

    def __call__(self, *features: torch.Tensor) -> torch.Tensor:
        """Returns the estimated chance, of the shape of the features."""
        return torch.sigmoid(self.weights[0] + sum(w * x for w, x in zip(self.weights[1:], features)))

    def learn(self, happened: torch.Tensor, *features: torch.Tensor) -> None:
        """Takes one step for events with these features that did or did not happen, all of shape `(events,)`."""
        if len(happened):
            error = self(*features) - happened.float()
            gradient = torch.stack([(error * x).sum() for x in (torch.ones_like(error), *features)])
            self.squares += gradient**2
            self.weights -= self.learning_rate * gradient / self.squares.sqrt()


def log_odds(probability: torch.Tensor) -> torch.Tensor:
    """Returns log(p / (1 - p)), finite at 0 and 1."""
    return torch.logit(probability, eps=1e-6)
