import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from hf_ssd import devices
from hf_ssd.drafting.sampling import SpeculationNoise, draw, saguaro
from hf_ssd.generation.proposers.random_tokens import RandomFallback


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


def places_drawn_from(monkeypatch, place=lambda key, counter: (key, *counter)):
    """Where in which cipher the draft's noise and random proposals of a batch begin, larger than its texts are long."""
    drawn_from, philox = [], np.random.Philox

    def noted(key, counter):
        drawn_from.append(place(key, counter))
        return philox(key=key, counter=counter)

    monkeypatch.setattr(np.random, "Philox", noted)
    noise, rows, lengths = SpeculationNoise(7, 11, torch.device("cpu")), range(12), range(1, 7)
    for length in lengths:
        for row in rows:
            noise.at(row, length, 0)
        RandomFallback(11, 7).propose([[0] * length] * 12, list(rows), 3)
    return drawn_from


def test_noise_and_random_proposals_never_share_numbers(monkeypatch):
    drawn_from = places_drawn_from(monkeypatch)
    assert len(set(drawn_from)) == len(drawn_from) == 2 * 12 * 6
    for _, low, *_ in drawn_from:
        assert low == 0  # counts what a place has drawn


def test_places_that_differ_by_their_order_only_are_noticed(monkeypatch):
    """The mutant for the test above: nothing but the order of row and position keeps the two apart."""
    drawn_from = places_drawn_from(monkeypatch, lambda key, counter: (key, *counter[2:]))
    assert len(set(drawn_from)) < len(drawn_from)


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


# ---------------------------------------------------------------- Saguaro sampling (Definition 14)


def distribution(seed, vocab_size, sharpness):
    scores = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (sharpness * scores).softmax(0)


def hit_rate_and_acceptance(p, q, fan_out, c, rescale=saguaro):
    """Exactly: the chance that the bonus token after a rejection is one of the draft's `fan_out` favourites."""
    proposal = rescale(q, fan_out, c)
    residual = (p - proposal).clamp(min=0)
    favourites = q.topk(fan_out).indices
    return float(residual[favourites].sum() / residual.sum()), float(torch.minimum(p, proposal).sum())


def never_falls_with_c(seeds, vocab_size, fan_out, sharpness, rescale=saguaro):
    p, q = (distribution(seed, vocab_size, sharpness) for seed in seeds)
    rates = [hit_rate_and_acceptance(p, q, fan_out, c, rescale)[0] for c in (1.0, 0.8, 0.5, 0.2, 0.0)]
    assert all(after >= before - 1e-9 for before, after in zip(rates, rates[1:]))


@given(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), st.integers(3, 40), st.integers(1, 12),
       st.floats(0.1, 4))  # fmt: skip
def test_the_hit_rate_does_not_fall_as_c_falls(seeds, vocab_size, fan_out, sharpness):
    """Theorem 15."""
    assume(seeds[0] != seeds[1] and fan_out < vocab_size)
    never_falls_with_c(seeds, vocab_size, fan_out, sharpness)


def test_scaling_other_tokens_would_be_noticed():
    """The mutant for the test above: the draft's least likely tokens become less likely."""

    def scales_the_least_likely(q, fan_out, c):
        bottom = q.topk(fan_out, largest=False).indices
        scaled = q.scatter(0, bottom, q[bottom] * c)
        return scaled / scaled.sum()

    with pytest.raises(AssertionError):
        for seed in range(20):
            never_falls_with_c((seed, seed + 100), 12, 4, 1.0, scales_the_least_likely)


@pytest.mark.parametrize("c", [0.0, 0.25, 0.5, 0.9])
def test_a_draft_equal_to_the_target_trades_acceptance_for_certain_hits(c):
    """
    The construction behind Theorem 19 as we understand it, by hand: the target says what the draft says, of which the F
    favourites have the share s. Only they are ever the bonus token after a rejection, and C s / (C s + 1 - s) + 1 - s
    of the tokens pass.
    """
    q = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    s = 0.7
    hit_rate, acceptance = hit_rate_and_acceptance(q, q, 2, c)
    assert hit_rate == pytest.approx(1.0)
    assert acceptance == pytest.approx(c * s / (c * s + 1 - s) + 1 - s)


def test_saguaro_by_hand_and_its_edges():
    q = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(saguaro(q, 1, 0.5)[0], torch.tensor([0.25, 0.3, 0.2]) / 0.75)
    assert saguaro(q, 1, 1.0) is q and saguaro(q, 0, 0.3) is q
    assert torch.equal(saguaro(q, 2, 0.0), torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]))  # nothing left: as it was
    assert torch.equal(saguaro(q, 9, 0.0), q)  # more favourites than tokens


def test_a_later_speculation_of_the_same_place_draws_anew():
    noise = SpeculationNoise(3, 50, torch.device("cpu"))
    assert not torch.equal(noise.at(0, 5, 1), noise.at(0, 6, 0))


def unlikely_tokens_drawn(noise):
    """How often one of 100,000 tokens of probability 1e-12 is drawn in 500 draws: 5e-5 times are expected."""
    probabilities = torch.full((100_000,), 1e-12)
    probabilities[0] = 1.0
    return sum(int(draw(probabilities, noise.at(0, start, 0))) != 0 for start in range(500))


def test_unlikely_tokens_are_not_drawn_more_often_than_q_says(monkeypatch):
    """The mutant draws noise in float32, which is 0 once in 2^23 numbers: then any token wins."""
    assert unlikely_tokens_drawn(SpeculationNoise(0, 100_000, torch.device("cpu"))) == 0
    draw_noise = np.random.Generator.standard_exponential

    class InFloat32(np.random.Generator):
        def standard_exponential(self, size):
            return draw_noise(self, size, dtype=np.float32)

    monkeypatch.setattr(np.random, "Generator", InFloat32)
    assert unlikely_tokens_drawn(SpeculationNoise(0, 100_000, torch.device("cpu"))) > 0


def test_a_device_without_double_precision_gets_the_noise_of_the_cpu(monkeypatch):
    moved = []
    monkeypatch.setattr(devices, "from_host", lambda noise, device: moved.append((noise.dtype, device)) or noise)
    there = torch.device("mps")
    noise = [SpeculationNoise(3, 50, device).at(1, 2, 4) for device in (there, torch.device("cpu"))]
    assert torch.equal(*noise) and moved[0] == (torch.float32, there)
