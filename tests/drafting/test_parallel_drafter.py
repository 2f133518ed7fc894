"""Parallel drafts: what is proposed is what the whole model gives, in one forward pass a round."""

import dataclasses

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper

import hf_ssd
from hf_ssd import SSDConfig
from hf_ssd.drafting.cache_shapes import shape_for
from hf_ssd.drafting.drafters import drafter_for
from hf_ssd.drafting.parallel_drafter import ParallelDrafter
from hf_ssd.drafting.speculator import Speculator
from hf_ssd.drafting.verified_prefix import VerifiedPrefix
from hf_ssd.rounds import AHEAD, NGRAM, Outcome, Plan

from ..helpers.tiny import padded_batch, tiny_model
from .test_speculator import interrupted_after, passes_from_now_on, prepared

MASK, VOCAB, LOOKAHEAD = 4, 5, 3
PLAN = Plan(AHEAD, LOOKAHEAD, LOOKAHEAD, budget=6)
PROMPTS = [[2, 3, 1], [3, 1, 2, 2, 0, 1]]


def new_speculator(family="llama", prompts=PROMPTS, sampled=True, **settings):
    config = SSDConfig(**{"lookahead": LOOKAHEAD, "budget": 6, **settings})
    options = {"do_sample": True, "temperature": 0.8, "top_k": 4} if sampled else {}
    generation = GenerationConfig(max_length=60, eos_token_id=None, pad_token_id=0, **options)
    model = tiny_model(family, seed=4, vocab_size=VOCAB, pard_token=MASK)
    drafter = drafter_for(model, config, generation, [torch.tensor(prompt) for prompt in prompts], seed=5)
    speculator = Speculator(drafter, config, shape_for(config), limit=60)
    speculator.begin()
    return speculator


def marginals(speculator, text, count):
    """From one pass of the model over the text, mask tokens behind it, without any cache."""
    model = speculator.drafter.prefix.decoder.view
    ids = torch.tensor([[*text, *[MASK] * (count - 1)]])
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopKLogitsWarper(4)])
    return warpers(None, model(ids, use_cache=False).logits[0, -count:]).softmax(-1)


def prepared_outcomes(speculator, texts, drafted):
    """Each outcome that is prepared: the text up to its bonus token, and its tokens and distributions."""
    cache = speculator.prepared
    told = torch.cat(cache.probabilities, dim=2)
    for row, text in enumerate(texts):
        for place, (k, bonus) in enumerate(zip(cache.accepted[row], cache.bonus[row])):
            if k >= 0:
                yield [*text, *drafted[row][:k], bonus], torch.tensor(cache.tokens[row][place]), told[row, place]


def behind(cache, accepted):
    """The bonus tokens that were prepared for an accepted count of the first row."""
    return [token for k, token in zip(cache.accepted[0], cache.bonus[0]) if k == accepted]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
@torch.inference_mode()
def test_what_is_proposed_is_what_the_model_gives_for_its_text(family):
    speculator, plan = new_speculator(family), PLAN
    texts, drafted = [list(prompt) for prompt in PROMPTS], [[], []]
    for turn in range(5):
        speculator.prepare(plan)
        count = 0
        for text, tokens, told in prepared_outcomes(speculator, texts, drafted):
            torch.testing.assert_close(told, marginals(speculator, text, LOOKAHEAD), atol=1e-5, rtol=0)
            assert (told.gather(1, tokens[:, None]) > 0).all()
            count += 1
        assert count >= 8
        place = 0 if turn % 2 else -1
        one = prepared(speculator, place)
        if turn == 2:  # a miss of the first row
            hits = behind(speculator.prepared, 0)
            one.tokens[0] = [next(token for token in range(VOCAB) if token not in hits)]
        texts = [text + tokens for text, tokens in zip(texts, one.tokens)]
        answer = speculator.answer(one, plan)
        for row, text in enumerate(texts):
            expected = marginals(speculator, text, LOOKAHEAD)
            torch.testing.assert_close(answer.probabilities[row], expected, atol=1e-5, rtol=0)
        drafted = answer.tokens


def of_another_branch(monkeypatch):
    feed = VerifiedPrefix.feed_with_branches
    monkeypatch.setattr(VerifiedPrefix, "feed_with_branches", lambda *arguments: feed(*arguments).roll(1, dims=1))


def mask_tokens_stay(monkeypatch):
    monkeypatch.setattr(VerifiedPrefix, "forget_speculation", lambda self: None)


def branches_see_one_another(monkeypatch):
    everything = lambda count, length, device: torch.ones(count * length, count * length, dtype=torch.bool)  # noqa: E731
    monkeypatch.setattr("hf_ssd.cache.masks.chains", everything)


@pytest.mark.parametrize("mutant", [of_another_branch, mask_tokens_stay, branches_see_one_another])
def test_mistakes_are_noticed(mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test_what_is_proposed_is_what_the_model_gives_for_its_text("llama")


@torch.inference_mode()
def test_one_forward_pass_a_round_and_one_more_on_a_miss(monkeypatch):
    speculator, plan = new_speculator(fan_out="uniform"), PLAN
    speculator.prepare(plan)
    passes = passes_from_now_on(speculator, monkeypatch)
    for turn in range(6):
        hit = prepared(speculator, turn % 3)
        if turn % 2:
            used = behind(speculator.prepared, hit.accepted[0])
            hit.tokens[0][-1] = next(token for token in range(VOCAB) if token not in used)
        answer = speculator.answer(hit, plan)
        assert answer.record.steps == turn % 2 == len(passes)
        speculator.prepare(plan)
        assert len(passes) - turn % 2 == 1
        passes.clear()


@torch.inference_mode()
def test_what_is_not_known_of_a_speculation_is_read_before_outcomes_are_chosen(monkeypatch):
    """After an n-gram, and after rounds in which the draft was not asked, there are no marginals to choose by."""
    speculator = new_speculator(prompts=[[2, 3, 1, 0] * 3], sampled=False)
    plan = dataclasses.replace(PLAN, fallback=NGRAM)
    speculator.prepare(plan)
    used = speculator.prepared.bonus[0]
    passes = passes_from_now_on(speculator, monkeypatch)
    bonus = next(token for token in range(VOCAB) if token not in [*used, 4]) if len(set(used)) < VOCAB else 4
    speculator.prepared.branches = [{}]  # nothing hits
    assert not speculator.answer(Outcome([[bonus]]), plan).width and speculator.waits and not passes
    speculator.take_speculation([[2, 3, 1, 0]], [NGRAM])
    speculator.prepare(plan)
    assert len(passes) == 2
    speculator.answer(Outcome([[2, 3, 3, 1]]), dataclasses.replace(PLAN, lookahead=0, after_miss=0))
    passes.clear()
    speculator.prepare(plan)
    assert len(passes) == 2


@torch.inference_mode()
def test_finished_rows_are_left_out_and_an_early_outcome_is_served_in_one_pass(monkeypatch):
    speculator, alone = (new_speculator(prompts=prompts, fan_out="uniform") for prompts in (PROMPTS, PROMPTS[:1]))
    speculator.prepare(PLAN, interrupted_after(0))
    answer = speculator.answer(Outcome([[2], []]), PLAN)
    assert answer.record.steps == 1
    speculator.prepare(PLAN)
    alone.answer(Outcome([[2]]), PLAN)
    alone.prepare(PLAN)
    assert speculator.prepared.bonus[0] == alone.prepared.bonus[0]
    for ours, theirs in zip(speculator.prepared.probabilities, alone.prepared.probabilities):
        torch.testing.assert_close(ours[0], theirs[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "changes, settings, message",
    [
        ({}, {"drafter": "parallel"}, "no `pard_token`"),
        ({"pard_token": VOCAB}, {}, f"is {VOCAB}, which is not in its vocabulary of {VOCAB} tokens"),
        ({"pard_token": "<mask>"}, {}, "is '<mask>', which is not in its vocabulary"),
        ({}, {"drafter": "fast"}, '`drafter` is \'fast\', but must be "auto", "autoregressive", "parallel"'),
    ],
)
def test_what_cannot_draft_in_parallel_is_refused_in_a_sentence(changes, settings, message):
    target, draft = hf_ssd.enable(tiny_model(vocab_size=VOCAB)), tiny_model(vocab_size=VOCAB, **changes)
    inputs = {name: tensor % VOCAB for name, tensor in padded_batch(1).items()}
    with pytest.raises(ValueError, match=message):
        target.generate(**inputs, assistant_model=draft, ssd_config=SSDConfig(**settings))


def test_a_parallel_draft_can_be_told_to_draft_token_by_token():
    draft = tiny_model(vocab_size=VOCAB, pard_token=VOCAB)
    drafter = drafter_for(draft, SSDConfig(drafter="autoregressive"), GenerationConfig(), [torch.tensor([1])], seed=0)
    assert not isinstance(drafter, ParallelDrafter)
