import math

import numpy as np
import pytest

from hf_ssd.drafting.calibration import OnlineLogistic, log_odds


def squared_error(model, learns=True, events=3000):
    """Events whose chance is a logistic function of a feature; the error of the estimates in the second half."""
    generator = np.random.default_rng(3)
    errors = []
    for number in range(events):
        feature = 2 * generator.standard_normal(1)
        chance = 1 / (1 + np.exp(1 - 2 * feature))
        if number > events // 2:
            errors.append(float((model(feature)[0] - chance[0]) ** 2))
        if learns:
            model.learn(generator.random(1) < chance, feature)
    return sum(errors) / len(errors)


def test_it_learns_the_chance_of_events_from_any_start():
    for weights in ([0.0, 0.0], [3.0, -1.0]):
        assert squared_error(OnlineLogistic(weights)) < 0.01 < squared_error(OnlineLogistic(weights), learns=False)


def test_no_event_teaches_nothing():
    model = OnlineLogistic([0.5, 1.0])
    model.learn(np.zeros(0, dtype=bool), np.zeros(0))
    assert model.weights.tolist() == [0.5, 1.0]


def test_log_odds_are_finite_and_invert_the_logistic_function():
    assert np.isfinite(log_odds(np.array([0.0, 1.0]))).all()
    assert 1 / (1 + math.exp(-log_odds(0.3))) == pytest.approx(0.3)
