"""Online calibration of probabilities: logistic regression that learns from each observed event."""

import numpy as np


class OnlineLogistic:
    """Estimates the chance of an event, of whose inputs the first is a constant 1, by AdaGrad (Duchi et al., 2011)."""

    # In numpy, which processes so few numbers in microseconds.

    def __init__(self, weights: list[float], learning_rate: float = 0.3):
        self.weights = np.array(weights)
        self.learning_rate = learning_rate
        self.squares = np.ones(len(weights))

    def __call__(self, *inputs: np.ndarray) -> np.ndarray:
        """Returns the estimated chance, of the shape of the inputs."""
        score = self.weights[0] + sum(w * x for w, x in zip(self.weights[1:], inputs))
        return 0.5 + 0.5 * np.tanh(0.5 * score)  # the logistic function in a form that does not overflow

    def learn(self, happened: np.ndarray, *inputs: np.ndarray) -> None:
        """Takes a single step for all events. `happened` and each of the inputs have shape `(events,)`."""
        if len(happened):
            error = self(*inputs) - happened
            gradient = np.array([error.sum(), *(error @ x for x in inputs)])
            self.squares += gradient**2
            self.weights -= self.learning_rate * gradient / np.sqrt(self.squares)


def log_odds(probability: np.ndarray | float) -> np.ndarray:
    """Returns log(p / (1 - p)), finite at 0 and 1."""
    probability = np.minimum(np.maximum(probability, 1e-6), 1 - 1e-6)
    return np.log(probability / (1 - probability))
