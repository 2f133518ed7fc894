"""The output distribution of verification, enumerated exactly on small vocabularies."""

import itertools
import math

import pytest
import torch

from hf_ssd.generation import verification
from hf_ssd.generation.deciding import check_drawn
from hf_ssd.generation.verification import (
    Chance,
    acceptance_probabilities,
    drawn,
    residual_distribution,
    verify_sampled,
)
from hf_ssd.noise import Noise

VOCAB = 5


def random_tree(depth, seed, sparse=0.0):
    """Next-token distributions for every prefix of up to `depth` tokens, some tokens impossible."""
    generator = torch.Generator().manual_seed(seed)
    tree = {}
    for length in range(depth + 1):
        for prefix in itertools.product(range(VOCAB), repeat=length):
            weights = torch.rand(VOCAB, generator=generator, dtype=torch.float64) ** 3
            weights[torch.rand(VOCAB, generator=generator) < sparse] = 0
            weights[int(torch.randint(VOCAB, (1,), generator=generator))] += 0.1
            tree[prefix] = weights / weights.sum()
    return tree


def add_continuations(joint, p, prefix, chance):
    """What comes after the bonus token is the target's own."""
    if chance == 0:
        return
    if len(prefix) == joint.dim():
        joint[prefix] += chance
        return
    for token in range(VOCAB):
        add_continuations(joint, p, (*prefix, token), chance * p[prefix][token].item())


def plain_distribution(p, length):
    joint = torch.zeros([VOCAB] * length, dtype=torch.float64)
    add_continuations(joint, p, (), 1.0)
    return joint


def verify(scores, q, drafted):
    rows = torch.arange(len(drafted))
    chance = Chance(Noise(int(torch.randint(2**31, ())), scores.shape[-1]), rows, torch.zeros_like(rows))
    return verify_sampled(scores, q, drafted, chance)


def output_distribution(p, q, said, lookahead):
    """
    The joint distribution of the next lookahead + 1 tokens, summed over all drafts and all decisions. What is `said` of
    a draft may differ from the `q` that it is drawn from; `None` says that each token was certain.
    """
    joint = torch.zeros([VOCAB] * (lookahead + 1), dtype=torch.float64)
    for draft in itertools.product(range(VOCAB), repeat=lookahead):
        survived = math.prod(q[draft[:i]][token].item() for i, token in enumerate(draft))
        if survived == 0:
            continue
        drafted = torch.tensor([draft])
        p_rows = torch.stack([p[draft[:i]] for i in range(lookahead + 1)])[None]
        q_rows = None if said is None else torch.stack([said[draft[:i]] for i in range(lookahead)])[None]
        ratios = verification.acceptance_probabilities(p_rows, q_rows, drafted)[0].clamp(0, 1).tolist()
        for accepted, ratio in enumerate([*ratios, 0.0]):  # after the last drafted token every round ends
            ends, survived = survived * (1 - ratio), survived * ratio
            if ends > 0:
                residual = verification.residual_distribution(p_rows, q_rows, drafted, torch.tensor([accepted]))[0]
                residual = residual / residual.sum()
                for bonus in range(VOCAB):
                    add_continuations(joint, p, (*draft[:accepted], bonus), float(ends * residual[bonus]))
    return joint


NO_PROBABILITIES = [float("nan"), float("inf"), 0.0, -0.5, -float("inf")]


def found_and_expected(lost=None, lookahead=2):
    """Distributions for a draft of whose q behind each odd token another number may arrive than what it draws from."""
    p, q = random_tree(lookahead, seed=1), random_tree(lookahead, seed=2)
    said = dict(q)
    for prefix in said if lost is not None else ():
        if prefix and prefix[-1] % 2:
            said[prefix] = torch.full_like(q[prefix], lost)
    return output_distribution(p, q, said, lookahead), plain_distribution(p, lookahead + 1)


@pytest.mark.parametrize("value", NO_PROBABILITIES)
def test_what_cannot_be_a_probability_is_rejected_and_the_target_decides_alone(value):
    torch.testing.assert_close(*found_and_expected(value), atol=1e-6, rtol=0)


@pytest.mark.parametrize("lookahead", [1, 2, 3])
@pytest.mark.parametrize("case", ["dense", "truncated", "equal", "point mass"])
def test_output_distribution_is_the_targets(lookahead, case):
    p, q = (random_tree(lookahead, seed, sparse=0.4 if case == "truncated" else 0.0) for seed in (1, 2))
    q = {"equal": p, "point mass": dict.fromkeys(p, torch.eye(VOCAB)[2])}.get(case, q)
    joint = output_distribution(p, q, None if case == "point mass" else q, lookahead)
    torch.testing.assert_close(joint, plain_distribution(p, lookahead + 1), atol=1e-6, rtol=0)


def residual_without_q(p, q, drafted, accepted):
    return p[torch.arange(len(accepted)), accepted]


def accept_if_likeliest(p, q, drafted):
    return (p[:, :-1].argmax(-1) == drafted).double()


def accept_without_q(p, q, drafted):
    return acceptance_probabilities(p, None, drafted)


def residual_of_the_next_position(p, q, drafted, accepted):
    return residual_distribution(p, q, drafted, (accepted + 1).clamp(max=drafted.shape[1]))


def accept_whatever_q_is(p, q, drafted):
    ratio = p[:, :-1].gather(2, drafted[:, :, None]).squeeze(2) / q.gather(2, drafted[:, :, None]).squeeze(2)
    return ratio.nan_to_num(1.0)


def residual_whatever_q_is(p, q, drafted, accepted):
    rows = torch.arange(len(accepted))
    place = accepted.clamp(max=drafted.shape[1] - 1)
    residual = (p[rows, accepted] - q[rows, place]).nan_to_num(0.0, 1.0).clamp(min=0) + 1e-12
    return torch.where((accepted < drafted.shape[1])[:, None], residual, p[rows, accepted])


@pytest.mark.parametrize(
    "name, mutant, lost",  # the number that arrives in place of some of q
    [
        ("residual_distribution", residual_without_q, None),
        ("residual_distribution", residual_of_the_next_position, None),
        ("acceptance_probabilities", accept_if_likeliest, None),
        ("acceptance_probabilities", accept_without_q, None),
        ("acceptance_probabilities", accept_whatever_q_is, 0.0),
        ("residual_distribution", residual_whatever_q_is, float("inf")),
    ],
)
def test_plausible_mistakes_change_the_distribution(monkeypatch, name, mutant, lost):
    monkeypatch.setattr(verification, name, mutant)
    found, expected = found_and_expected(lost)
    assert (found - expected).abs().max() > 1e-3


def share_accepted(monkeypatch, p, bits=52):
    """How many of all random numbers that there are, which have so many bits, accept a token."""
    monkeypatch.setattr(Noise, "uniform", lambda self, places: torch.full(places.shape, next_number, dtype=float))
    scores = torch.tensor([p, 1 - p]).log().expand(1, 2, 2)
    q, drafted = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[0]])
    low, high, next_number = 0, 2**bits, 0.0
    if not verify(scores, q, drafted)[0].item():
        return 0.0
    while high - low > 1:  # those below some number are accepted
        middle = (low + high) // 2
        next_number = middle / 2**bits
        low, high = (middle, high) if verify(scores, q, drafted)[0].item() else (low, middle)
    return high / 2**bits


@pytest.mark.parametrize("p", [2.0**-30, 2.0**-24, 3e-8, 0.0005, 0.3])
def test_rare_tokens_are_accepted_as_rarely_as_they_are(monkeypatch, p):
    p = float(torch.tensor([p, 1 - p]).log().softmax(0)[0])  # as float32 has it
    assert share_accepted(monkeypatch, p) == pytest.approx(p, rel=1e-5)


def test_random_numbers_that_are_too_coarse_are_noticed(monkeypatch):
    assert share_accepted(monkeypatch, 2.0**-30, bits=24) > 2.0**-25


# ---------------------------------------------------------------- what is no probability


@pytest.mark.parametrize("value", NO_PROBABILITIES)
def test_no_random_number_accepts_what_cannot_be_a_probability_or_is_impossible(monkeypatch, value):
    """Even when the random number is exactly 0."""
    monkeypatch.setattr(Noise, "uniform", lambda self, places: torch.zeros(places.shape))
    scores, q = torch.zeros(3, 2, VOCAB), torch.full((3, 1, VOCAB), 1 / VOCAB)
    q[0, 0, 3], scores[2, 0, 3] = value, -torch.inf
    accepted, bonus, unlikely = verify(scores, q, torch.full((3, 1), 3))
    assert accepted.tolist() == [0, 1, 0] and ((0 <= bonus) & (bonus < VOCAB)).all() and bonus[2] != 3
    assert not unlikely.any()


def test_accepted_tokens_that_no_one_draws_are_counted():
    q = torch.full((3, 2, VOCAB), 1 / VOCAB)
    q[0, :, 3], q[1, 1, 3], q[2, 0, 3] = 1e-8, 1e-30, 1e-6
    scores = torch.zeros(3, 3, VOCAB)
    scores[2, 1] = torch.tensor([0.0, 0.0, 0.0, -torch.inf, 0.0])  # the second is not accepted
    accepted, _, unlikely = verify(scores, q, torch.full((3, 2), 3))
    assert accepted.tolist() == [2, 2, 1] and unlikely.tolist() == [2, 1, 0]
    *_, none = verify(scores, None, torch.full((3, 2), 3))
    assert none.tolist() == [0, 0, 0]


def test_bonus_tokens_are_drawn_as_multinomial_draws_them():
    weights = torch.rand(50, 97, generator=torch.Generator().manual_seed(0))
    weights[:, ::3] = 0
    torch.manual_seed(1)
    expected = torch.multinomial(weights, 1).squeeze(1)
    torch.manual_seed(1)
    noise = torch.empty_like(weights).exponential_()
    assert torch.equal(drawn(weights, noise), expected)
    assert not torch.equal(drawn(weights, noise.roll(1, 0)), expected)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -1.0, None])
def test_a_row_without_a_distribution_is_refused_as_by_multinomial(number):
    weights = torch.ones(2, 5)
    weights[1, :] = 0 if number is None else 1
    weights[1, 2] = 0 if number is None else number
    with pytest.raises(RuntimeError):
        torch.multinomial(weights, 1)
    tokens = drawn(weights, torch.ones(2, 5)).tolist()
    assert tokens[0] >= 0 > tokens[1]
    with pytest.raises(RuntimeError, match="probability tensor"):
        check_drawn(tokens)
