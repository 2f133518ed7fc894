"""Gemma 4 assistants and DFlash drafts read what their target computes; they draft what transformers drafts."""

import copy

import pytest
import torch
from scipy import stats
from transformers.generation import candidate_generator

import hf_ssd
from hf_ssd.cache.cache_name import CACHE
from hf_ssd.drafting.parallel_drafter import BlockPrefix

from ..helpers.assistants import (
    KINDS,
    agreement,
    dflash_draft,
    gemma4_assistant,
    gemma4_target,
    keep_rejected_tokens,
    muse_glimmer_target,
    read_the_token_before,
)
from ..helpers.sampled_strings import PROMPT, SMALL, WARPERS, exact_probabilities, p_value
from ..helpers.suites import slowly
from ..helpers.tape import use_tapes
from ..helpers.tiny import padded_batch, speculated, tiny_model

CALLS = 250
UNSHARED = {"num_kv_shared_layers": 0, "sliding_window": 64}
PAIRS = {
    "dflash": lambda: (tiny_model(), dflash_draft),
    "muse_glimmer": lambda: (muse_glimmer_target(), dflash_draft),
    "gemma4": lambda: (gemma4_target(), gemma4_assistant),  # the last layers share keys, as in small Gemma 4
    "gemma4, unshared": lambda: (gemma4_target(**UNSHARED), gemma4_assistant),
}


@pytest.fixture(scope="module")
def pair(request):
    """A target and its draft."""
    target, draft_for = PAIRS[request.param]()
    return hf_ssd.enable(target), draft_for(target)


of_dflash = pytest.mark.parametrize("pair", ["dflash", slowly("muse_glimmer")], indirect=True)
of_both = pytest.mark.parametrize(
    "pair", ["dflash", slowly("muse_glimmer"), "gemma4", slowly("gemma4, unshared")], indirect=True
)


def of_blocks(target, draft, config, read, count):
    embeddings = target.get_input_embeddings(), target.get_output_embeddings()
    generator = candidate_generator.DFlashTokenCandidateGenerator(draft, *embeddings, config)
    return generator, target(read, **generator.model_kwargs_overrides)


def of_single_positions(target, assistant, config, read, count):
    kind = candidate_generator.SinglePositionMultiTokenCandidateGenerator
    assistant.generation_config.num_assistant_tokens = count
    outputs = target(read, output_hidden_states=True, return_shared_kv_states=True)
    if not outputs.shared_kv_states:  # transformers gives none of a target whose layers share none
        last = zip(KINDS, outputs[CACHE].layers[-2:])
        outputs.shared_kv_states = {kind: (layer.keys, layer.values) for kind, layer in last}
    return kind(assistant, target.get_input_embeddings(), config), outputs


@torch.no_grad()
def drafted_by_transformers(target, draft, text: torch.LongTensor, count: int) -> list[int]:
    """Returns the tokens that transformers drafts after a text whose tokens but the last the target has read."""
    config = copy.deepcopy(target.generation_config)
    config.max_length = len(text) + count + 1
    make = of_blocks if hasattr(draft.config, "block_size") else of_single_positions
    generator, outputs = make(target, draft, config, text[None, :-1], count)
    inputs = {"position_ids": torch.arange(len(text))[None], "attention_mask": torch.ones(1, len(text))}
    tokens, _ = generator.get_candidates(text[None], inputs, outputs, False, 0)
    return tokens[0, len(text) :][:count].tolist()


def agrees(pair, **options) -> list[bool]:
    return agreement(pair, drafted_by_transformers, **options)


@of_both
def test_a_draft_drafts_what_transformers_drafts(pair):
    assert all(agrees(pair))


@of_dflash
@pytest.mark.parametrize(
    "options",
    [
        {"ends": True, "lookahead": 4},
        slowly({"length": 80, "lookahead": 4}),  # whose tokens are fed without queries
        slowly({"lookahead": 2}),  # the first tokens of a block
    ],
)
def test_blocks_of_other_calls_are_those_of_transformers(pair, options):
    assert all(agrees(pair, **options))


@pytest.mark.slow
@of_dflash
def test_more_tokens_than_the_block_has_are_drafted_with_a_larger_block(pair):
    longer = copy.deepcopy(pair[1])
    longer.config.block_size = 8
    assert not all(agrees(pair, lookahead=7))  # transformers has 4 tokens alone
    assert all(agrees((pair[0], longer), lookahead=7))


@pytest.mark.slow
@of_dflash
def test_captured_passes_draft_the_same_tokens(pair, monkeypatch):
    tapes = use_tapes(monkeypatch)
    assert all(agrees(pair, lookahead=4, cuda_graphs=True)) and sum(tape.replayed for tape in tapes.made) > 5


@pytest.mark.parametrize("mutate", [read_the_token_before, keep_rejected_tokens])
@of_both
def test_states_of_other_tokens_are_noticed(pair, mutate, monkeypatch):
    """The mutants for the tests above, and those of blocks below: hidden states, keys and values."""
    mutate(monkeypatch)
    assert not all(agrees(pair))


def one_place_off(monkeypatch):
    """The token at a place is that of the place before, as in a parallel draft."""
    feed = BlockPrefix.feed
    monkeypatch.setattr(BlockPrefix, "feed", lambda *arguments, **options: feed(*arguments, **options).roll(1, dims=1))


def causal_blocks(monkeypatch):
    following = BlockPrefix._next

    def causal(self, *counts):
        inputs, *places = following(self, *counts)
        inputs[..., -1] = 0
        return inputs, *places

    monkeypatch.setattr(BlockPrefix, "_next", causal)


def mask_tokens_stay(monkeypatch):
    """Tokens that were read as a block are not read again with their features."""
    take = BlockPrefix.read_target

    def stay(self, outcome):
        fed = list(self.fed)
        take(self, outcome)
        self.fed = fed

    monkeypatch.setattr(BlockPrefix, "read_target", stay)


@pytest.mark.parametrize("mutate", [one_place_off, slowly(causal_blocks), slowly(mask_tokens_stay)])
@of_dflash
def test_mistakes_in_blocks_are_noticed(pair, mutate, monkeypatch):
    mutate(monkeypatch)
    assert not all(agrees(pair, lookahead=4))


@pytest.mark.slow
@of_dflash
def test_a_draft_of_another_type_than_the_target_drafts(pair):
    draft = copy.deepcopy(pair[1]).to(torch.bfloat16)
    output = speculated(pair[0], draft, padded_batch(3), {"lookahead": 4}, least=0, max_new_tokens=12, pad_token_id=0)
    assert max(output.ssd_stats.column("lookahead")) >= 4


# ---------------------------------------------------------------- refused


def with_flash_attention(target):
    draft = dflash_draft(target)
    draft.config._attn_implementation = "flash_attention_2"
    return draft


REFUSED = {  # by a Llama target
    r"reads the hidden states \[1, 9\]": lambda target: dflash_draft(target, target_layer_ids=[0, 8]),
    "mask token 97 is not in the vocabulary": lambda target: dflash_draft(target, mask_token_id=97),
    "made for another target": lambda target: dflash_draft(target, hidden_size=64),
    "uses flash attention, which takes no 4D masks": with_flash_attention,
    "is none; use the target": lambda target: gemma4_assistant(gemma4_target()),
}


def check_refused(reason, target, draft, **settings):
    with pytest.raises(ValueError, match=reason):
        target.generate(**padded_batch(1), assistant_model=draft, ssd_config=hf_ssd.SSDConfig(**settings))


@pytest.mark.parametrize("reason", REFUSED)
def test_a_draft_that_does_not_fit_is_refused(target, reason):
    check_refused(reason, target, REFUSED[reason](target))


def test_an_assistant_for_another_target_of_its_kind_is_refused():
    check_refused("does not fit", hf_ssd.enable(gemma4_target(head_dim=16)), gemma4_assistant(gemma4_target()))


@of_dflash
@pytest.mark.parametrize("drafter", ["eagle3", "mtp", "parallel"])
def test_another_drafter_is_refused(pair, drafter):
    check_refused("leave out", *pair, drafter=drafter)


@of_both
def test_a_worker_for_a_draft_is_refused(pair, tmp_path):
    with pytest.raises(ValueError, match="drafts in the target's process: load it"):
        hf_ssd.launch_draft(pair[1])
    pair[1].save_pretrained(tmp_path)
    check_refused("drafts in the target's process: load it", pair[0], str(tmp_path))


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
