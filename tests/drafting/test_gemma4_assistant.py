"""Gemma 4 assistants read their target's keys and values; they draft the tokens that transformers drafts."""

import copy

import pytest
import torch
from scipy import stats
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

import hf_ssd
from hf_ssd.cache.cache_name import CACHE

from ..helpers.assistants import (
    KINDS,
    agreement,
    gemma4_assistant,
    gemma4_target,
    keep_rejected_tokens,
    read_the_token_before,
)
from ..helpers.sampled_strings import PROMPT, SMALL, WARPERS, exact_probabilities, p_value
from ..helpers.tiny import padded_batch

CALLS = 250
UNSHARED = {"num_kv_shared_layers": 0, "sliding_window": 64}


@pytest.fixture(scope="module", params=[{}, pytest.param(UNSHARED, marks=pytest.mark.slow)])
def pair(request):
    """A target whose last layers share keys, as in small Gemma 4, or do not, and its assistant."""
    target = hf_ssd.enable(gemma4_target(**request.param))
    return target, gemma4_assistant(target)


def drafted_by_transformers(target, assistant, text: torch.LongTensor, count: int) -> list[int]:
    """Returns the tokens that transformers drafts after a text whose tokens but the last the target has read."""
    config = copy.deepcopy(target.generation_config)
    config.max_length = len(text) + count + 1
    assistant.generation_config.num_assistant_tokens = count
    generator = SinglePositionMultiTokenCandidateGenerator(assistant, target.get_input_embeddings(), config)
    with torch.no_grad():
        outputs = target(text[None, :-1], output_hidden_states=True, return_shared_kv_states=True)
        if not outputs.shared_kv_states:  # transformers gives none of a target whose layers share none
            last = zip(KINDS, outputs[CACHE].layers[-2:])
            outputs.shared_kv_states = {kind: (layer.keys, layer.values) for kind, layer in last}
        tokens, _ = generator.get_candidates(text[None], {"attention_mask": None}, outputs, False, 0)
    return tokens[0, len(text) :].tolist()


def agrees(pair) -> list[bool]:
    return agreement(pair, drafted_by_transformers)


def test_the_assistant_drafts_what_transformers_drafts(pair):
    assert all(agrees(pair))


@pytest.mark.parametrize("mutate", [read_the_token_before, keep_rejected_tokens])
def test_mistakes_are_noticed(pair, mutate, monkeypatch):
    """Hidden states, keys and values of other tokens."""
    mutate(monkeypatch)
    assert not all(agrees(pair))


def test_an_assistant_for_another_target_and_a_worker_for_one_are_refused(pair, target):
    for other, words in (
        (hf_ssd.enable(gemma4_target(head_dim=16)), "does not fit"),
        (target, "is none; use the target"),
    ):
        with pytest.raises(ValueError, match=words):
            other.generate(**padded_batch(1), assistant_model=pair[1], ssd_config=hf_ssd.SSDConfig())
    with pytest.raises(ValueError, match="drafts in the target's process: load it"):
        hf_ssd.launch_draft(pair[1])


# ---------------------------------------------------------------- the distribution of sampled tokens


@pytest.mark.slow
def test_transformers_own_path_has_another_distribution():
    """
    transformers drafts the likeliest token, and verifies it as if it had been drawn (docs/compared_with.md). The same
    assistant in hf_ssd has the target's distribution.
    """
    target = hf_ssd.enable(gemma4_target(vocab_size=SMALL, vocab_size_per_layer_input=SMALL, std=0.15))
    assistant = gemma4_assistant(target, std=0.1)
    assistant.generation_config.num_assistant_tokens = 2
    counts = torch.zeros(SMALL, dtype=torch.double)
    for seed in range(CALLS):
        torch.manual_seed(seed)
        output = target.generate(PROMPT, max_new_tokens=3, do_sample=True, **WARPERS, assistant_model=assistant)
        counts[output[0, PROMPT.shape[1] + 1]] += 1  # the first token that was drafted
    expected = CALLS * exact_probabilities(target).view(SMALL, -1).sum(1)
    counts, expected = counts[expected > 0], expected[expected > 0].double()
    assert stats.chisquare(counts, expected * (counts.sum() / expected.sum())).pvalue < 1e-4
    assert p_value(target, assistant, calls=8, seed=21, at_least=1.05) > 1e-3
