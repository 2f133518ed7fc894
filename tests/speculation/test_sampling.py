import pytest
import torch
from scipy import stats

from hf_ssd.speculation.sampling import SpeculationNoise, draw


def test_noise_depends_on_the_place_alone():
    one, other = (SpeculationNoise(7, 11, torch.device("cpu")) for _ in range(2))
    places = [(0, 5, 0), (3, 5, 0), (0, 6, 0), (0, 5, 1), (2, 1000, 3)]
    first = {place: one.at(*place).clone() for place in places}
    one.forget_before([10**6] * 4)
    for place in reversed(places):
        assert torch.equal(other.at(*place), first[place])
        assert torch.equal(one.at(*place), first[place])
    assert len({tuple(noise.tolist()) for noise in first.values()}) == len(places)
    assert not torch.equal(SpeculationNoise(8, 11, torch.device("cpu")).at(0, 5, 0), first[0, 5, 0])


def draws(noise, probabilities, shared: bool):
    places = [(row, start, depth) for row in range(20) for start in range(100) for depth in range(5)]
    return torch.stack([draw(probabilities, noise.at(0, 0, 0) if shared else noise.at(*place)) for place in places])


def test_draws_follow_the_distribution_and_neighbours_are_independent():
    probabilities = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    tokens = draws(SpeculationNoise(1, 4, torch.device("cpu")), probabilities, shared=False)
    counts = torch.bincount(tokens, minlength=4)
    assert counts[3] == 0
    assert stats.chisquare(counts[:3], 10_000 * probabilities[:3]).pvalue > 1e-3
    pairs = torch.bincount(tokens[:-1] * 3 + tokens[1:], minlength=9)
    expected = torch.outer(probabilities[:3], probabilities[:3]).flatten() * (len(tokens) - 1)
    assert stats.chisquare(pairs, expected).pvalue > 1e-3


def test_noise_that_is_the_same_everywhere_is_noticed():
    """The mutant for the test above."""
    probabilities = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    counts = torch.bincount(draws(SpeculationNoise(1, 4, torch.device("cpu")), probabilities, shared=True), minlength=4)
    assert stats.chisquare(counts[:3], 10_000 * probabilities[:3]).pvalue < 1e-3


@pytest.mark.parametrize("token", range(3))
def test_a_point_mass_is_always_drawn(token):
    noise = SpeculationNoise(2, 3, torch.device("cpu"))
    certain = torch.nn.functional.one_hot(torch.tensor(token), 3).float()
    assert all(draw(certain, noise.at(0, p, 0)) == token for p in range(50))
