"""Parallel drafts: what is proposed is what the whole model gives, in one forward pass a round."""

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper

import hf_ssd
from hf_ssd import SSDConfig
from hf_ssd.drafting.drafters import drafter_for
from hf_ssd.drafting.parallel_drafter import ParallelDrafter
from hf_ssd.drafting.verified_prefix import VerifiedPrefix

from ..helpers.proposals import LOOKAHEAD, check_proposals, new_speculator
from ..helpers.tiny import padded_batch, tiny_model

MASK, VOCAB = 4, 5


def check(family):
    """What is proposed is what one pass of the model gives over the text, with mask tokens behind it."""
    speculator = new_speculator(tiny_model(family, seed=4, vocab_size=VOCAB, pard_token=MASK), temperature=0.8, top_k=4)
    model = speculator.drafter.prefix.decoder.view
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopKLogitsWarper(4)])

    def marginals(text, follow, own):
        ids = torch.tensor([[*text, *follow[:own], *[MASK] * (LOOKAHEAD - 1)]])
        return warpers(None, model(ids, use_cache=False).logits[0, -LOOKAHEAD:]).softmax(-1)

    check_proposals(speculator, marginals)


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_what_is_proposed_is_what_the_model_gives_for_its_text(family):
    check(family)


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
        check("llama")


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
