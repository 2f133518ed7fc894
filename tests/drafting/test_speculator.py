"""What a speculator asks of its draft. What it drafts is compared by whole calls, in `tests/conformance`."""

import dataclasses

import pytest
import torch
from transformers import GenerationConfig

from hf_ssd import SSDConfig
from hf_ssd.drafting.autoregressive_drafter import AutoregressiveDrafter
from hf_ssd.drafting.drafts import Drafts
from hf_ssd.drafting.request import SessionRequest
from hf_ssd.drafting.speculator import answer_width
from hf_ssd.rounds import AHEAD, FINISHED, IN_TURN, NOTHING, PREPARED, PRIMARY, RANDOM, Outcome, Plan

from ..helpers.preparing import prepare_until
from ..helpers.tiny import VOCAB, tiny_model

PROMPTS = [list(range(2, 5 + 3 * row)) for row in range(3)]
IN_TIME, PREPARES = Plan(IN_TURN, 4, 4), Plan(AHEAD, 4, 4, budget=12)


def new_speculator(prompts=PROMPTS, **sampling):
    config, rows = SSDConfig(lookahead=4, budget=12, fan_out="uniform"), [torch.tensor(prompt) for prompt in prompts]
    generation = GenerationConfig(max_length=200, eos_token_id=1, pad_token_id=0, **sampling)
    request = SessionRequest(config, generation, rows, 5, VOCAB, prompt_length=max(map(len, PROMPTS)))
    speculator = Drafts().speculator(tiny_model(seed=4), request)
    speculator.drafter.begin()
    return speculator


SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 30}


def check_same(first, second, rows):
    assert [first.tokens[row] for row in rows] == [second.tokens[row] for row in rows]
    torch.testing.assert_close(first.probabilities[rows], second.probabilities[rows], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("grown", [4, 2, 0])
@torch.inference_mode()
def test_rows_that_hit_have_their_tokens_when_a_proposer_is_asked_for_the_others(grown):
    """
    Of their branches so many tokens were drafted before the outcome came. The draft leaves the row that missed alone,
    and goes on when it is told the tokens that are verified.
    """
    plan, left = dataclasses.replace(PREPARES, fallback=RANDOM), iter(range(grown))
    speculator, in_time = new_speculator(**SAMPLED), new_speculator(**SAMPLED)
    prepare_until(speculator, plan, lambda: next(left, None) is None)
    bonus = [of_row[0] for of_row in speculator.prepared.bonus]
    bonus[1] = next(t for t in range(2, VOCAB) if t not in speculator.prepared.bonus[1])
    answer = speculator.answer(Outcome([[token] for token in bonus]), plan)
    assert answer.record.sources == [PREPARED, NOTHING, PREPARED] and speculator.waits
    assert answer.tokens[1] == [] and answer.record.steps == 4 - grown
    check_same(answer, in_time.answer(Outcome([[token] for token in bonus]), IN_TIME), [0, 2])
    verified = [answer.tokens[0], [7, 8, 9, 10], answer.tokens[2]]
    speculator.take_speculation(verified, [PREPARED, RANDOM, PREPARED])
    speculator.prepare(plan)
    assert speculator.drafter.drafted.tolist() == verified
    assert speculator.prepared.accepted[1].count(0) >= 10  # the likely outcome of a random proposal
    fresh = new_speculator([[*of, token, *two[:2]] for of, token, two in zip(PROMPTS, bonus, verified)], **SAMPLED)
    answer = speculator.answer(Outcome.of(verified, [2] * 3, [9] * 3), IN_TIME)
    check_same(answer, fresh.answer(Outcome([[9]] * 3), IN_TIME), [0, 1, 2])


def test_a_draft_that_keeps_what_it_read_in_the_place_of_a_proposal_is_noticed(monkeypatch):
    """The mutant for the test above."""
    monkeypatch.setattr(AutoregressiveDrafter, "forget_speculation", lambda self: None)
    with pytest.raises(AssertionError):
        test_rows_that_hit_have_their_tokens_when_a_proposer_is_asked_for_the_others(0)


@pytest.mark.parametrize("is_told", [True, False])
@torch.inference_mode()
def test_an_ngram_is_read_as_what_is_verified_beside_drafted_tokens(is_told):
    """A shorter one is padded. The mutant: it does not leave with the outcome, so the draft drafts for its row."""
    speculator = new_speculator([[2, 3, 4, 5, 6, 7, 8] * 2, [9, 8, 7]], **SAMPLED)
    answer = speculator.answer(Outcome([[2], [5]], [[3, 4], []] if is_told else None), IN_TIME)
    assert (answer.tokens[0] == []) == is_told and len(answer.tokens[1]) == 4
    speculator.catch_up()
    assert (speculator.drafter.drafted.tolist() == [[3, 4, 0, 0], answer.tokens[1]]) == is_told


@pytest.mark.parametrize("fallback, steps", [(RANDOM, 0), (PRIMARY, 4)])
@torch.inference_mode()
def test_a_finished_row_makes_no_one_draft(fallback, steps, monkeypatch):
    """Two rows missed, and a fallback serves them without the draft, or the draft does."""
    speculator, plan, passes = new_speculator(), dataclasses.replace(PREPARES, fallback=fallback), []
    speculator.answer(Outcome([[5], [6], [7]]), plan)
    speculator.prepare(plan)
    known = {token for row in speculator.prepared.bonus for token in row}
    unprepared = next(token for token in range(2, VOCAB) if token not in known)
    decoder = speculator.drafter.prefix.decoder
    forward = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda *given, **more: passes.append(1) or forward(*given, **more))
    answer = speculator.answer(Outcome([[unprepared], [], [unprepared]]), plan)
    assert not any(answer.record.hits) and answer.width == steps == len(passes)
    assert speculator.waits == (fallback == RANDOM)


@pytest.mark.parametrize(
    "known, width",
    [
        ([7, 6], 5),  # more than was planned, from an earlier plan
        ([5, 3], 3),  # what all rows have
        ([3, 0], 2),  # a row has less than is worth drafting just in time
    ],
)
def test_answer_width(known, width):
    assert answer_width(Plan(AHEAD, lookahead=5, after_miss=2, budget=8), known) == width


@torch.inference_mode()
def test_the_shape_learns_from_each_round_that_it_chose_outcomes_for(monkeypatch):
    speculator, learned = new_speculator(), []
    monkeypatch.setattr(speculator.shape, "learn", lambda seen, accepted, bonus: learned.append((accepted, bonus)))
    for turn in range(4):
        speculator.prepare(PREPARES)
        told = Outcome.of(speculator.verified, [turn % 2, 0, FINISHED], [turn, 6, 7])
        if turn == 2:  # tokens of rounds for which nothing was chosen
            told.tokens = [told.tokens[0] + [8, 9], told.tokens[1] + [8], []]
        speculator.answer(told, PREPARES)
    speculator.prepare(PREPARES)
    assert learned == [([turn % 2, 0, FINISHED], [turn, 6, 0]) for turn in range(4)]
