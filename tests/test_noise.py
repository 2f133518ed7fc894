"""Random numbers are a function of their place, the same in every process, and no two places share one."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from hf_ssd import noise
from hf_ssd.config import LONGEST_LOOKAHEAD
from hf_ssd.drafting.sampling import draw
from hf_ssd.noise import ACCEPTANCE, BONUS, DRAFTED, FALLBACK, STEP, Noise, check_fits, places, splitmix

from .helpers.sampled_strings import chi_square, power_of


def test_numbers_are_those_of_splitmix64():
    """The first outputs of its authors' program with the seed 1234567."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    for indices in (torch.arange(1, 5), np.arange(1, 5)):
        assert [int(n) % 2**64 for n in splitmix(indices * STEP + 1234567)] == expected


def place_of(purpose, *place):
    return places(purpose, *torch.tensor(place))


def test_no_two_places_of_the_largest_call_share_a_number():
    depths, tokens = (0, 1, LONGEST_LOOKAHEAD), (0, 1, 2**19, 2**20 - 1)
    everywhere = itertools.product((DRAFTED, BONUS, ACCEPTANCE, FALLBACK), (0, 1, 4095), (0, 1, 2**22 - 1), depths)
    indices = [int(place_of(*place)) + token for place, token in itertools.product(everywhere, tokens)]
    numbers = splitmix(torch.tensor(indices) * STEP + 7).tolist()
    assert len(set(numbers)) == len(set(indices)) == 4 * 3**3 * 4


@pytest.mark.parametrize("bits", ["ROW", "START", "DEPTH", "TOKEN"])
def test_an_index_with_a_bit_less_is_noticed(monkeypatch, bits):
    """The mutant for the test above."""
    monkeypatch.setattr(noise, bits, getattr(noise, bits) - 1)
    with pytest.raises(AssertionError):
        test_no_two_places_of_the_largest_call_share_a_number()


def test_the_largest_call_is_taken():
    """Larger calls are refused: see `tests/conformance/test_errors.py`."""
    check_fits(rows=4096, positions=2**22, vocab_size=2**20)


def test_numpy_and_torch_compute_the_same():
    """The CPU's numbers come from numpy, those of other devices from torch."""
    where = place_of(BONUS, 1, 2, 3) + torch.arange(1000)
    on_cpu = Noise(5, 1).uniform(where)
    mixed = splitmix(where * STEP + Noise(5, 1).first)
    assert torch.equal(on_cpu, ((mixed >> 12) & (2**52 - 1)).double().add(0.5) * 2.0**-52)


def test_the_smallest_and_the_largest_number_are_possible_ones(monkeypatch):
    place = torch.tensor([5])
    for bits in (0, -1):
        monkeypatch.setattr(noise, "splitmix", lambda n, bits=bits: n * 0 + bits)
        drawn = Noise(1, 3)
        in_float64 = drawn.exponential(place)
        assert 0 < drawn.uniform(place) < 1 and (in_float64 > 0).all() and in_float64.isfinite().all()
        monkeypatch.setattr(noise, "has_float64", lambda device: False)
        assert drawn.uniform(place).dtype == torch.float32 and 0 < drawn.uniform(place) < 1
        assert torch.equal(drawn.exponential(place), in_float64)
        monkeypatch.undo()


# ---------------------------------------------------------------- the distribution


def draws(probabilities, starts):
    where = places(DRAFTED, torch.arange(20)[:, None, None], starts[:, None], torch.arange(5)).flatten()
    return draw(probabilities, Noise(1, len(probabilities)).exponential(where))


def fits(measure, starts):
    """Of single tokens and of pairs of neighbours."""
    probabilities = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    tokens = draws(probabilities, starts)
    counts = torch.bincount(tokens, minlength=4)
    assert counts[3] == 0
    pairs = torch.bincount(tokens[:-1] * 3 + tokens[1:], minlength=9)
    of_pairs = torch.outer(probabilities[:3], probabilities[:3]).flatten()
    return measure(counts, probabilities), measure(pairs, of_pairs)


def test_draws_follow_the_distribution_and_neighbours_are_independent():
    assert min(fits(chi_square, torch.arange(100))) > 1e-3
    assert max(fits(power_of, torch.zeros(100, dtype=torch.long))) > 0.99  # the mutant: places share their noise


def test_acceptance_is_uniform_and_does_not_go_with_the_bonus_token():
    where = [places(purpose, torch.arange(50)[:, None], torch.arange(100), 0) for purpose in (ACCEPTANCE, BONUS)]
    uniform, bonus = Noise(3, 1).uniform(where[0]).flatten(), Noise(3, 1).exponential(where[1]).flatten()
    assert stats.kstest(uniform, "uniform").pvalue > 1e-3 and stats.kstest(bonus, "expon").pvalue > 1e-3
    assert abs(float(torch.corrcoef(torch.stack([uniform, bonus.double()]))[0, 1])) < 4 / 5000**0.5


def unlikely_tokens_drawn():
    """How often one of 100,000 tokens of probability 1e-12 is drawn in 1,000 draws: 1e-4 times are expected."""
    probabilities = torch.full((100_000,), 1e-12)
    probabilities[0] = 1.0
    numbers, starts = Noise(0, 100_000), (place_of(BONUS, 0, start, 0) for start in range(1000))
    return sum(int(draw(probabilities, numbers.exponential(start))) != 0 for start in starts)


@pytest.mark.slow
def test_unlikely_tokens_are_not_drawn_more_often_than_q_says(monkeypatch):
    """The mutant has numbers of float32, which are 1 once in 2^25: their noise is 0, and then any token wins."""
    assert unlikely_tokens_drawn() == 0
    uniform = Noise._uniform

    def in_float32(self, places):
        return uniform(self, places[..., None] + torch.arange(self.vocab_size)).float().log().abs()

    monkeypatch.setattr(Noise, "exponential", in_float32)
    assert unlikely_tokens_drawn() > 0
