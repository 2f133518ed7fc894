import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from hf_ssd import SSDConfig
from hf_ssd.drafting.cache_shapes import CANDIDATES, SHAPES, allocate, chances_of_counts, outcome_chances, shape_for
from hf_ssd.drafting.drafts import Drafts
from hf_ssd.drafting.outcome_candidates import UNUSED, OutcomeCandidates
from hf_ssd.drafting.request import SessionRequest


def candidates(rows=3, lookahead=4, vocab_size=30, guesses=24, from_fallback=False, seed=0, sharpness=2.0):
    generator = torch.Generator().manual_seed(seed)
    scores = sharpness * torch.randn(rows, lookahead + 1, vocab_size, generator=generator)
    drafted = scores[:, :lookahead].argmax(-1)
    return OutcomeCandidates.of(scores, scores, drafted, [from_fallback] * rows, guesses)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(lambda w: sum(w) > 1e-9), st.integers(1, 500))
def test_allocation_sums_to_the_budget_and_is_nearly_proportional(weights, budget):
    result = allocate(weights, budget)
    assert sum(result) == budget
    assert all(abs(n - budget * w / sum(weights)) < 1 + 1e-6 for n, w in zip(result, weights))


@given(
    st.sampled_from([*SHAPES]), st.integers(1, 7), st.integers(1, 40), st.integers(0, 10**6), st.floats(0, 8),
    st.booleans(),
)  # fmt: skip
def test_every_shape_spends_the_budget_on_distinct_outcomes(name, lookahead, budget, seed, sharpness, from_fallback):
    view = candidates(2, lookahead, 50, max(budget, 32), from_fallback, seed, sharpness)
    shape = shape_for(SSDConfig(fan_out=name))
    for _ in range(2):  # before and after it has learned something
        fan_outs = shape.fan_outs(view, budget)
        assert all(sum(row) == budget and min(row) >= 0 and len(row) == lookahead + 1 for row in fan_outs)
        accepted, bonus = view.outcomes(fan_outs)
        for row in range(2):
            outcomes = set(zip(accepted[row], bonus[row]))
            assert len(accepted[row]) == len(outcomes) == budget and UNUSED not in accepted[row]
        shape.learn(view, [lookahead, -1], [0, 0])


def test_shapes_by_hand():
    view = candidates(lookahead=3)
    uniform, geometric = (shape_for(SSDConfig(fan_out=name)) for name in ("uniform", "geometric"))
    assert uniform.fan_outs(view, 10) == [[3, 3, 2, 2]] * 3
    (fan_out, *_) = geometric.fan_outs(candidates(lookahead=7), 24)
    assert fan_out[:-1] == sorted(fan_out[:-1], reverse=True)
    assert fan_out[-1] > fan_out[-2]  # after the last token the bonus comes from p itself: often, so it pays
    assert shape_for(SSDConfig(fan_out=[3, 0, 0, 5])).fan_outs(view, 8) == [[3, 0, 0, 5]] * 3
    assert shape_for(SSDConfig(fan_out=[3, 0, 5])).fan_outs(view, 8) == [[2, 2, 2, 2]] * 3  # another lookahead


def mean_round(shape, acceptance, after_rejection, at_the_end):
    """A round in which the draft's probabilities are the mean ones, and the chances that the shape takes from them."""
    lookahead = len(acceptance)
    probabilities = np.array([after_rejection] * lookahead + [at_the_end])[None]
    tokens = np.arange(CANDIDATES) + np.zeros((1, lookahead + 1, 1), dtype=np.int64)
    limits = [CANDIDATES] * (lookahead + 1)
    view = OutcomeCandidates(tokens, probabilities, acceptance[None], np.zeros((1, lookahead)), [False], limits)
    if hasattr(shape, "accepted"):  # it calibrates the draft's probabilities
        ranks = np.log(np.arange(1, CANDIDATES + 1))
        acceptance = shape.accepted(view.drafted_log_odds, view.luck)[0]
        after_rejection = shape.right_after_rejection(view.log_odds[0, 0], ranks)
        at_the_end = shape.right_at_the_end(view.log_odds[0, -1], ranks)
    return view, (acceptance, after_rejection, at_the_end)


def covered_and_prepared(name, lookahead, seed, budgets, prepares=None):
    """The mass that a shape says it covers, and that of what it (or another shape) prepares."""
    generator = np.random.default_rng(seed)
    acceptance = generator.uniform(0.1, 0.95, lookahead)
    guesses = -np.sort(-generator.dirichlet(np.full(2 * CANDIDATES, 0.2), 2))[:, :CANDIDATES]
    shape = shape_for(SSDConfig(fan_out=name if isinstance(name, str) else name[: lookahead + 1]))
    view, chances = mean_round(shape, acceptance, *guesses)
    mass, prepared = outcome_chances(*chances), []
    for budget in budgets:
        (fan_out,) = (shape if prepares is None else shape_for(SSDConfig(fan_out=prepares))).fan_outs(view, budget)
        prepared.append(sum(mass[k, :count].sum() for k, count in enumerate(fan_out)))
    return shape.covered(*chances, budgets), prepared


@pytest.mark.parametrize("name", [*SHAPES, [3, 0, 2, 1, 1, 5]], ids=str)
@pytest.mark.parametrize("lookahead", [1, 5])
def test_the_mass_that_a_shape_covers_is_that_of_what_it_prepares(name, lookahead):
    for seed in range(5):
        covered, prepared = covered_and_prepared(name, lookahead, seed, [1, 2, 7, 24, 48])
        assert covered == pytest.approx(prepared, abs=1e-9)
    # The mutant: another shape prepares. Shapes may agree where there are only two accepted counts.
    others = (covered_and_prepared(name, lookahead, 0, [1, 2, 7, 24, 48], other) for other in ("uniform", "confidence"))
    assert any(covered != pytest.approx(prepared, abs=1e-3) for covered, prepared in others)


@given(st.lists(st.floats(0, 1), max_size=8))
def test_chances_of_counts_by_enumeration(acceptance):
    chances = chances_of_counts(np.array(acceptance)).tolist()
    assert math.fsum(chances) == pytest.approx(1)
    for k, chance in enumerate(chances):
        rejected = 1 - acceptance[k] if k < len(acceptance) else 1
        assert chance == pytest.approx(math.prod(acceptance[:k]) * rejected)


@pytest.mark.parametrize("name", SHAPES)
def test_after_a_fallback_practically_everything_is_at_zero(name):
    view = candidates(rows=1, lookahead=4, from_fallback=True)
    view = dataclasses.replace(view, drafted_probabilities=np.full((1, 4), 1e-3))  # of an arbitrary token
    (fan_out,) = shape_for(SSDConfig(fan_out=name)).fan_outs(view, 16)
    assert fan_out[0] >= 15
    view = dataclasses.replace(view, drafted_probabilities=np.full((1, 4), 0.95))  # as if the draft had said it
    (fan_out,) = shape_for(SSDConfig(fan_out=name)).fan_outs(view, 16)
    assert fan_out[0] < 9


def simulated_hits(shape, rounds=400, budget=8, lookahead=4, vocab_size=40, lesson=lambda k: k):
    """A draft whose confidence tells how often it is right, and a target that follows the draft's distribution."""
    generator = torch.Generator().manual_seed(5)
    hits = 0
    for _ in range(rounds):
        sharpness = 4 * torch.rand(1, lookahead + 1, 1, generator=generator)
        scores = sharpness * torch.randn(1, lookahead + 1, vocab_size, generator=generator)
        drafted = scores[:, :lookahead].argmax(-1)
        view = OutcomeCandidates.of(scores, scores, drafted, [False], 24)
        accepted, bonus = view.outcomes(shape.fan_outs(view, budget))
        choice = torch.multinomial(scores[0].softmax(-1), 1, generator=generator)[:, 0]
        k = int((choice[:-1] == drafted[0]).long().cumprod(0).sum())
        hits += (k, int(choice[k])) in zip(accepted[0], bonus[0])
        shape.learn(view, [lesson(k)], [int(choice[k])])
    return hits / rounds


def test_confidence_beats_the_shapes_that_do_not_look_at_the_round():
    rates = {name: simulated_hits(shape_for(SSDConfig(fan_out=name))) for name in SHAPES}
    others = 0.05 + max(rates["geometric"], rates["uniform"])
    assert rates["confidence"] > others
    # The mutant: it learns the opposite of what happened.
    assert simulated_hits(shape_for(SSDConfig(fan_out="confidence")), lesson=lambda k: 4 - k) < others


def hits_with_luck(known, rounds=400, budget=4, lookahead=4, vocab_size=40):
    """Hits where the target finds drafted tokens as often more likely as less, and accepts them by the luck that is."""
    shape, rng, hits = shape_for(SSDConfig()), np.random.default_rng(5), 0
    for seed in range(rounds):
        view = candidates(1, lookahead, vocab_size, seed=seed, sharpness=4.0)
        luck = rng.exponential(size=(1, lookahead)) - 1
        is_accepted = rng.normal(-0.5, 0.3, lookahead) > -1 - luck[0]
        view = dataclasses.replace(view, luck=known(luck))
        k = int(is_accepted.cumprod().sum())
        bonus = int(rng.choice(view.guesses[0, k], p=view.chances[0, k] / view.chances[0, k].sum()))
        hits += (k, bonus) in zip(*(of_row[0] for of_row in view.outcomes(shape.fan_outs(view, budget))))
        shape.learn(view, [k], [bonus])
    return hits / rounds


def test_the_luck_of_drafted_tokens_makes_hits():
    rate, without = hits_with_luck(lambda luck: luck), hits_with_luck(np.zeros_like)
    assert rate > without + 0.05
    assert hits_with_luck(lambda luck: luck[:, ::-1]) < without + 0.05  # the mutant: the luck of another token


def test_guesses_are_the_likeliest_tokens_and_never_the_drafted_one():
    scores = torch.tensor([[[0.1, 0.9, 0.5, 0.3], [0.9, 0.1, 0.3, 0.5]]])
    view = OutcomeCandidates.of(scores, scores, torch.tensor([[1]]), [False], 4)
    accepted, bonus = view.outcomes([[2, 1]])
    assert accepted == [[0, 0, 1]] and bonus == [[2, 3, 0]]
    assert view.drafted_probabilities[0, 0] == pytest.approx(float(scores[0, 0].softmax(-1)[1]))


@pytest.mark.parametrize("coupled", [False, True])
def test_noise_counts_for_less_after_a_rejection(coupled):
    """As much less as leaves token 2, which by q / e is a little likelier than token 3, behind it."""
    scores, noise = torch.tensor([[[0.0, 9.0, 2.0, 3.0]] * 2]), torch.tensor([[[0.0, 0.0, -1.1, 0.0]] * 2]).exp()
    luck = None if coupled else np.zeros((1, 1))
    view = OutcomeCandidates.of(scores, scores, torch.tensor([[1]]), [False], 4, noise=noise, luck=luck)
    assert view.guesses[0].tolist() == [[2, 3, 0, 1] if coupled else [3, 2, 0, 1], [1, 2, 3, 0]]


def test_guesses_that_the_warpers_ruled_out_rank_by_their_logits():
    logits = torch.tensor([[[0.1, 0.9, 0.5, 0.3]]])
    scores = torch.where(logits > 0.8, logits, -torch.inf)
    view = OutcomeCandidates.of(scores, logits, torch.zeros(1, 0, dtype=torch.long), [False], 4)
    assert view.outcomes([[4]])[1] == [[1, 2, 3, 0]]


@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_small_vocabulary_gives_fewer_outcomes_and_no_repetition(lookahead):
    view = candidates(lookahead=lookahead, vocab_size=5)
    fan_outs = [[9] * (lookahead + 1), [1] * (lookahead + 1), [9] * (lookahead + 1)]
    accepted, bonus = view.outcomes(fan_outs)
    for row in range(3):
        assert len(accepted[row]) == len(bonus[row]) == 4 * lookahead + 5
        outcomes = [(k, t) for k, t in zip(accepted[row], bonus[row]) if k != UNUSED]
        assert len(set(outcomes)) == len(outcomes) == ((lookahead + 1) if row == 1 else 4 * lookahead + 5)


def test_confidence_takes_rows_that_hit_fallbacks_and_end_as_if_each_were_alone():
    together = shape_for(SSDConfig())
    mixed = dataclasses.replace(candidates(rows=4), from_fallback=[False, True, False, True])
    for _ in range(3):
        together.learn(mixed, [0, 2, -1, 4], [1, 2, 3, 4])
    rows = [field for field in dataclasses.fields(mixed) if field.name != "limits"]
    alone = [
        OutcomeCandidates(*(getattr(mixed, field.name)[r : r + 1] for field in rows), mixed.limits) for r in range(4)
    ]
    assert together.fan_outs(mixed, 9) == [together.fan_outs(row, 9)[0] for row in alone]
    # The mutant: a row's source is forgotten.
    mixed = dataclasses.replace(mixed, from_fallback=[False] * 4)
    assert together.fan_outs(mixed, 9) != [together.fan_outs(row, 9)[0] for row in alone]


def test_confidence_learns_nothing_from_finished_rows():
    shape, seen = shape_for(SSDConfig()), candidates(rows=2)

    before = shape.chances(seen)
    shape.learn(seen, [-1, -1], [0, 0])
    assert np.array_equal(shape.chances(seen), before)
    shape.learn(seen, [0, -1], [0, 0])  # the mutant: one of them is not finished
    assert not np.array_equal(shape.chances(seen), before)


# ---------------------------------------------------------------- what is kept between calls


def test_calls_share_what_a_shape_learns_only_with_calls_of_the_same_rule(draft):
    rules = [{}, {"verification": "coupled"}, {"saguaro_c": 0.5}, {"saguaro_c": 0.3}, {"fan_out": "uniform"}]
    drafts, shapes = Drafts(), []
    for temperature in (0.7, 1.0, 0.7, 1.0):
        generation = GenerationConfig(do_sample=True, temperature=temperature, max_length=20)
        for rule in rules:
            request = SessionRequest(SSDConfig(**rule), generation, [torch.tensor([5, 6])], 0, 97)
            shapes.append(drafts.speculator(draft, request).shape)
    first, again = shapes[: 2 * len(rules)], shapes[2 * len(rules) :]
    assert len({id(shape) for shape in first}) == len(first)
    assert all(one is other for one, other in zip(first, again))
