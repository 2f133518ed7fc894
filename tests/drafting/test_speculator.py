"""What a speculator asks of its draft, and what it answers beside rows that others propose for."""

import dataclasses
import math

import pytest
import torch
from transformers import GenerationConfig

from hf_ssd import SSDConfig
from hf_ssd.drafting.autoregressive_drafter import AutoregressiveDrafter
from hf_ssd.drafting.cache_shapes import shape_for
from hf_ssd.drafting.drafters import drafter_for
from hf_ssd.drafting.speculator import Speculator, answer_width
from hf_ssd.generation.proposers.random_tokens import RandomFallback
from hf_ssd.rounds import AHEAD, FINISHED, IN_TURN, NOTHING, PREPARED, PRIMARY, RANDOM, Outcome, Plan

from ..helpers.preparing import prepare_until
from ..helpers.tiny import VOCAB, tiny_model

OPTIONS = {"greedy": {}, "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 30}}
PROMPTS = [list(range(2, 5 + 3 * row)) for row in range(3)]
IN_TIME, PREPARES = Plan(IN_TURN, 4, 4), Plan(AHEAD, 4, 4, budget=12)


def new_speculator(options="greedy", prompts=PROMPTS, **settings):
    config = SSDConfig(**{"lookahead": 4, "budget": 12, **settings})
    generation = GenerationConfig(max_length=200, eos_token_id=1, pad_token_id=0, **OPTIONS[options])
    rows = [torch.tensor(prompt) for prompt in prompts]
    drafter = drafter_for(tiny_model(seed=4), config, generation, rows, seed=5, prompt_length=max(map(len, PROMPTS)))
    speculator = Speculator(drafter, shape_for(config), limit=200)
    speculator.drafter.begin()
    return speculator


def outcome(speculator, accepted, bonus):
    """The outcome of the tokens that a speculator knows to be verified."""
    return Outcome.of(speculator.verified, accepted, bonus)


def prepared(speculator, place):
    """The outcome that a place of the cache was prepared for, in each row."""
    cache = speculator.prepared
    return outcome(speculator, [row[place] for row in cache.accepted], [row[place] for row in cache.bonus])


def interrupted_after(steps):
    """An outcome that comes after some steps: none of the branches' tokens is drafted by then, or some, or all."""
    left = iter(range(steps))
    return lambda: next(left, None) is None


def assert_same(first, second, rows=None):
    rows = range(len(first.tokens)) if rows is None else list(rows)
    assert [first.tokens[row] for row in rows] == [second.tokens[row] for row in rows]
    if second.probabilities is not None:
        torch.testing.assert_close(first.probabilities[rows], second.probabilities[rows], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("steps", [0, 2, 5])
@torch.inference_mode()
def test_a_branch_that_is_half_grown_is_finished_alone(steps, monkeypatch):
    speculator, expected = (new_speculator("sampled", PROMPTS[:1], fan_out="uniform") for _ in range(2))
    prepare_until(speculator, PREPARES, interrupted_after(steps))
    grown, passes = min(4, steps), passes_from_now_on(speculator, monkeypatch)
    told = prepared(speculator, 1)
    answer = speculator.answer(told, PREPARES)
    assert answer.record.hits == [True] and answer.record.passes == grown
    assert_same(answer, expected.answer(told, IN_TIME))
    # What is ready is fed together, and the rest one by one: never more forward passes than tokens are missing.
    assert len(passes) == answer.record.steps == 4 - grown and all(shape[0] == 1 for shape in passes)


def passes_from_now_on(speculator, monkeypatch):
    shapes, decoder = [], speculator.drafter.prefix.decoder
    forward = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda ids, *a, **k: shapes.append(ids.shape) or forward(ids, *a, **k))
    return shapes


@pytest.mark.parametrize("grown", [4, 2, 0])
@torch.inference_mode()
def test_rows_that_hit_have_their_tokens_when_a_proposer_is_asked_for_the_others(grown):
    """The draft leaves the row that missed alone, and goes on when it is told the tokens that are verified."""
    plan = dataclasses.replace(PREPARES, fallback=RANDOM)
    speculator, in_time = (new_speculator("sampled", fan_out="uniform") for _ in range(2))
    prepare_until(speculator, plan, interrupted_after(grown))
    bonus = [tokens[-1] for tokens in prepared(speculator, 0).tokens]
    bonus[1] = next(t for t in range(2, VOCAB) if t not in speculator.prepared.bonus[1])
    answer = speculator.answer(outcome(speculator, [0] * 3, bonus), plan)
    assert answer.record.sources == ["prepared", NOTHING, "prepared"] and speculator.waits
    assert answer.tokens[1] == [] and answer.record.steps == 4 - grown
    assert_same(answer, in_time.answer(outcome(in_time, [0] * 3, bonus), IN_TIME), rows=[0, 2])
    text = [*PROMPTS[1], bonus[1]]
    ((proposed, _),) = RandomFallback(VOCAB, seed=5).propose([text] * 2, [1], 4)
    verified = [answer.tokens[0], proposed, answer.tokens[2]]
    speculator.take_speculation(verified, ["prepared", RANDOM, "prepared"])
    speculator.prepare(plan)
    assert speculator.drafter.drafted.tolist() == verified
    assert speculator.prepared.accepted[1].count(0) >= 10  # the likely outcome of a random proposal
    texts = [[*prompt, token, *tokens[:2]] for prompt, token, tokens in zip(PROMPTS, bonus, verified)]
    fresh = new_speculator("sampled", texts)
    answer = speculator.answer(outcome(speculator, [2] * 3, [9] * 3), IN_TIME)
    assert_same(answer, fresh.answer(Outcome([[9]] * 3), IN_TIME))


def test_a_draft_that_keeps_what_it_read_in_the_place_of_a_proposal_is_noticed(monkeypatch):
    """The mutant for the test above."""
    monkeypatch.setattr(AutoregressiveDrafter, "forget_speculation", lambda self: None)
    with pytest.raises(AssertionError):
        test_rows_that_hit_have_their_tokens_when_a_proposer_is_asked_for_the_others(0)


@pytest.mark.parametrize("fallback, steps", [(RANDOM, 0), (PRIMARY, 4)])
@pytest.mark.parametrize("options", ["greedy", "sampled"])
@torch.inference_mode()
def test_a_finished_row_makes_no_one_draft(options, fallback, steps, monkeypatch):
    """Two rows missed, and a fallback serves them without the draft, or the draft does."""
    plan, speculator = dataclasses.replace(PREPARES, fallback=fallback), new_speculator(options, fan_out="uniform")
    speculator.answer(Outcome([[5], [6], [7]]), plan)
    prepare_until(speculator, plan, interrupted_after(1))  # one token of each branch
    cache = speculator.prepared
    known = {token for row in zip(cache.accepted, cache.bonus) for k, token in zip(*row) if k == 0}
    unprepared = next(token for token in range(2, VOCAB) if token not in known)
    passes = passes_from_now_on(speculator, monkeypatch)
    answer = speculator.answer(Outcome([[unprepared], [], [unprepared]]), plan)
    assert not any(answer.record.hits) and answer.width == steps == len(passes)
    assert speculator.waits == (fallback == RANDOM)


@pytest.mark.parametrize(
    "known, width",
    [
        ([5, 5], 5),  # all rows have what was planned
        ([7, 6], 5),  # or more, from an earlier plan
        ([5, 3], 3),  # what all rows have
        ([3, 0], 2),  # a row has less than is worth drafting just in time
        ([math.inf, 4], 4),  # a finished row waits for nothing
        ([math.inf, 0], 2),
    ],
)
def test_answer_width(known, width):
    assert answer_width(Plan(AHEAD, lookahead=5, after_miss=2, budget=8), known) == width


@torch.inference_mode()
def test_after_a_miss_all_rows_have_as_many_tokens_as_are_worth_it():
    plan, speculator = dataclasses.replace(PREPARES, after_miss=2), new_speculator(fan_out="uniform")
    speculator.prepare(plan)
    assert speculator.answer(prepared(speculator, 0), plan).width == 4
    speculator.prepare(plan)
    assert speculator.answer(Outcome([[2], [3], [4]]), plan).width == 2


@torch.inference_mode()
def test_the_shape_learns_from_each_round_that_it_chose_outcomes_for(monkeypatch):
    speculator, learned = new_speculator(), []
    monkeypatch.setattr(speculator.shape, "learn", lambda seen, accepted, bonus: learned.append((accepted, bonus)))
    for turn in range(4):
        speculator.prepare(PREPARES)
        told = outcome(speculator, [turn % 2, 0, FINISHED], [turn, 6, 7])
        if turn == 2:  # tokens of rounds for which nothing was chosen
            told.tokens = [told.tokens[0] + [8, 9], told.tokens[1] + [8], []]
        speculator.answer(told, PREPARES)
    speculator.prepare(PREPARES)
    assert learned == [([turn % 2, 0, FINISHED], [turn, 6, 0]) for turn in range(4)]


REPEATED, NEW = [2, 3, 4, 5, 6, 7, 8] * 2, [9, 8, 7]


@pytest.mark.parametrize("options", ["greedy", "sampled"])
@torch.inference_mode()
def test_a_row_that_repeats_itself_verifies_an_ngram_beside_rows_that_are_drafted_for(options, monkeypatch):
    """In turn and after a hit: the draft drafts for the other row, and reads the n-gram as what is verified."""
    ahead, in_time = (new_speculator(options, [REPEATED, NEW], fan_out="uniform") for _ in range(2))
    ahead.prepare(PREPARES)
    told = Outcome([[2], [ahead.prepared.bonus[1][0]]])
    drafted = in_time.answer(told, IN_TIME)
    told.proposed = [[3, 4, 5, 6, 7, 8, 2, 3, 4], []]
    speculators = [ahead, new_speculator(options, [REPEATED, NEW])]
    for speculator, source in zip(speculators, (PREPARED, PRIMARY)):
        answer = speculator.answer(told, PREPARES)
        assert answer.record.sources == [NOTHING, source] and not speculator.waits
        assert answer.tokens == [[], drafted.tokens[1]]
        assert answer.record.steps == (0 if source == PREPARED else 4)
        if options == "sampled":
            torch.testing.assert_close(answer.probabilities[1], drafted.probabilities[1], atol=1e-5, rtol=1e-4)
        speculator.catch_up()
        assert speculator.drafter.drafted.tolist() == [told.proposed[0], drafted.tokens[1] + [0] * 5]

    # Outcomes behind the n-gram are prepared as behind any other speculation, at any of its tokens.
    monkeypatch.setattr(ahead.shape, "fan_outs", lambda candidates, budget: [[2] * len(candidates.limits)] * 2)
    ahead.prepare(PREPARES)
    assert {k for k in ahead.prepared.accepted[0] if k >= 0} == {*range(10)}
    place = ahead.prepared.accepted[0].index(5)
    told = outcome(ahead, [5, 0], [ahead.prepared.bonus[0][place], ahead.prepared.bonus[1][0]])
    assert ahead.answer(told, PREPARES).record.sources == [PREPARED, PREPARED]


@torch.inference_mode()
def test_an_ngram_that_is_shorter_than_the_drafted_tokens_is_padded():
    told = Outcome([[2], [5]], [[3, 4], []])
    speculator = new_speculator("sampled", [REPEATED, NEW])
    answer = speculator.answer(told, IN_TIME)
    assert answer.tokens[0] == [] and len(answer.tokens[1]) == 4
    speculator.catch_up()
    assert speculator.drafter.drafted.tolist() == [[3, 4, 0, 0], answer.tokens[1]]


@torch.inference_mode()
def test_where_all_rows_have_an_ngram_the_draft_does_nothing(monkeypatch):
    speculator = new_speculator("sampled", [REPEATED, NEW, REPEATED[1:]])
    passes = passes_from_now_on(speculator, monkeypatch)
    told = Outcome([[2], [], [2]], [[*range(3, 19)], [], [*range(3, 19)]])
    answer = speculator.answer(told, IN_TIME)
    assert answer.width == 0 and not passes
    speculator.answer(outcome(speculator, [16, FINISHED, 3], [5, 0, 9]), IN_TIME)
    assert passes  # the tokens that others proposed are read when the draft is needed again
