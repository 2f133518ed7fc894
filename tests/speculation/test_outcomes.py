import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_ssd import SSDConfig
from hf_ssd.speculation.outcomes import allocate, choose, fan_out


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(lambda w: sum(w) > 1e-9), st.integers(1, 500))
def test_allocation_sums_to_the_budget_and_is_nearly_proportional(weights, budget):
    result = allocate(weights, budget)
    assert sum(result) == budget
    assert all(abs(n - budget * w / sum(weights)) < 1 + 1e-6 for n, w in zip(result, weights))


def test_shapes():
    assert fan_out(SSDConfig(lookahead=3, budget=10, fan_out="uniform"), 3) == [3, 3, 2, 2]
    geometric = fan_out(SSDConfig(lookahead=7, budget=24), 7)
    assert sum(geometric) == 24 and geometric[:-1] == sorted(geometric[:-1], reverse=True)
    assert geometric[-1] > geometric[-2]  # after the last token the bonus comes from p itself: often, so it pays
    assert fan_out(SSDConfig(lookahead=2, fan_out=[3, 0, 5]), 2) == [3, 0, 5]
    for shape in ("geometric", "uniform", [1] * 8):
        assert fan_out(SSDConfig(fan_out=shape), 0) == [SSDConfig(fan_out=shape).budget]


def test_choose_takes_the_likeliest_tokens_and_never_the_drafted_one():
    scores = torch.tensor([[[0.1, 0.9, 0.5, 0.3], [0.9, 0.1, 0.3, 0.5]]])
    accepted, bonus = choose(scores, scores, torch.tensor([[1]]), [2, 1])
    assert accepted.tolist() == [0, 0, 1]
    assert bonus.tolist() == [[2, 3, 0]]


def test_choose_ranks_what_the_warpers_ruled_out_by_its_logits():
    logits = torch.tensor([[[0.1, 0.9, 0.5, 0.3]]])
    scores = torch.where(logits > 0.8, logits, -torch.inf)
    _, bonus = choose(scores, logits, torch.zeros(1, 0, dtype=torch.long), [4])
    assert bonus.tolist() == [[1, 2, 3, 0]]


@pytest.mark.parametrize("lookahead", [0, 2])
def test_choose_never_repeats_an_outcome_even_if_the_vocabulary_is_small(lookahead):
    scores = torch.randn(3, lookahead + 1, 5)
    drafted = scores[:, :lookahead].argmax(-1)
    accepted, bonus = choose(scores, scores, drafted, [9] * (lookahead + 1))
    assert len(accepted) == 4 * lookahead + 5
    for row in range(3):
        outcomes = list(zip(accepted.tolist(), bonus[row].tolist()))
        assert len(set(outcomes)) == len(outcomes)
        assert not set(outcomes) & set(enumerate(drafted[row].tolist()))
