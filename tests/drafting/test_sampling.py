import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_ssd.drafting.sampling import saguaro

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
