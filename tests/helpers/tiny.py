"""Tiny models, built from configs: random, sharp enough to have clear favourites, and drafts that often agree."""

import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import hf_ssd
from hf_ssd.distributed.assistant import DraftAssistant

from . import packing  # noqa: F401

VOCAB, FEW = 97, 12  # tokens of a model, and of one whose texts repeat themselves
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 6}),
    "gemma": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}


def tiny_model(family: str = "llama", seed: int = 0, **changes):
    model_class, config_class, special = FAMILIES[family]
    torch.manual_seed(seed)
    return model_class(config_class(**{**SIZES, **special, **changes})).eval()


def tiny_draft(family: str = "llama", seed: int = 0, disagreement: float = 0.03, **changes):
    """The target with noise on its weights: it agrees often, but not always."""
    draft = tiny_model(family, seed, **changes)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * disagreement)
    return draft


def tiny_llava():
    """The Llama model, which also sees images of 28 by 28 pixels; token 96 stands for each of their four patches."""
    eyes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**eyes, image_size=28, patch_size=14)
    config = LlavaConfig(text_config=LlamaConfig(**SIZES), vision_config=vision, image_token_index=96)
    torch.manual_seed(0)
    model, text = LlavaForConditionalGeneration(config).eval(), tiny_model()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    return model


def padded_batch(rows: int = 4, length: int = 9, seed: int = 0):
    """Prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(2, VOCAB, (rows, length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row in range(rows):
        attention_mask[row, : (3 * row) % (length - 1)] = 0
    return {"input_ids": input_ids.masked_fill(attention_mask == 0, 0), "attention_mask": attention_mask}


def repeating_batch(rows: int):
    """The same, of so few tokens that texts repeat themselves."""
    batch = padded_batch(rows)
    return {**batch, "input_ids": batch["input_ids"] % FEW}


def speculated(target, draft, inputs=None, settings=None, generate=None, least=1.0, **options):
    """
    Returns the output of a greedy call that speculates, in turn with fixed settings if there are no others, after it
    was seen that its tokens are those of plain generate() and more than `least` in a round.
    """
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, **options}
    inputs = padded_batch(2) if inputs is None else inputs
    config = hf_ssd.SSDConfig(**{"lookahead": 3, "budget": 8, "asynchronous": False, **(settings or {})})
    plain = target.generate(**inputs, **options).sequences
    output = (generate or target.generate)(**inputs, **options, assistant_model=draft, ssd_config=config)
    assert torch.equal(output.sequences, plain)
    assert output.ssd_stats.draft_failure is None and output.ssd_stats.tokens_per_round > least
    return output


def ready(assistant: DraftAssistant) -> DraftAssistant:
    """Starts workers that have ended, as the next call would, but waits for them."""
    assistant.begin_call(patience=120.0)
    return assistant
