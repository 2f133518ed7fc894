"""Tiny assistants of transformers, and tiny targets that they fit."""

import contextlib
from unittest.mock import patch

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
)

import hf_ssd
from hf_ssd.generation.target import Features
from hf_ssd.rounds import AHEAD, IN_TURN

from .heads import drafted_in
from .preparing import preparing
from .tiny import padded_batch

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 8, "max_position_embeddings": 256, "eos_token_id": None, "pad_token_id": 0, "bos_token_id": None}
SIZES |= {"tie_word_embeddings": False, "sliding_window": 6}
KINDS = ["sliding_attention", "full_attention"]


def noisy(model, std: float, seed: int):
    """Gives all matrices random values of this size: the defaults are so small that all texts look alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.copy_(std * torch.randn(weights.shape, generator=generator))
    return model.eval()


def gemma4_config(**changes) -> Gemma4TextConfig:
    own = {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
    own |= {"num_hidden_layers": 4, "layer_types": KINDS * 2, "global_head_dim": 16, "vocab_size": 97}
    return Gemma4TextConfig(**{**SIZES, **own, **changes})


def gemma4_target(seed: int = 0, std: float = 0.25, **changes):
    return noisy(AutoModelForCausalLM.from_config(gemma4_config(**changes)), std, seed)


def gemma4_assistant(target, seed: int = 1, std: float = 0.25, **changes) -> Gemma4AssistantForCausalLM:
    text = target.config.get_text_config(decoder=True)
    own = {"vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    own |= {"num_hidden_layers": 2, "layer_types": KINDS, "hidden_size": 16, "vocab_size": text.vocab_size}
    config = Gemma4AssistantConfig(
        text_config=gemma4_config(**own).to_dict(), backbone_hidden_size=text.hidden_size, **changes
    )
    # transformers 5.23 raises while it makes an assistant: no layer computes the keys that all of its layers read.
    modes = property(lambda self: ["reuse"] * self.num_hidden_layers)
    with patch.object(Gemma4TextConfig, "kv_sharing_modes", modes, create=True):
        return noisy(Gemma4AssistantForCausalLM(config), std, seed)


def muse_glimmer_target(seed: int = 0, std: float = 0.25, **changes) -> MuseGlimmerForConditionalGeneration:
    """A target whose embedding has a normalization, which a DFlash draft leaves out."""
    text = {**SIZES, "num_hidden_layers": 4, "vocab_size": 97, **changes}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"pos_emb_height": 4, "pos_emb_width": 4}
    sizes = {"out_hidden_size": 64, "projector_hidden_size": 16}
    config = MuseGlimmerConfig(text_config=text, vision_config=vision, **sizes)
    return noisy(MuseGlimmerForConditionalGeneration(config), std, seed)


def dflash_draft(target, seed: int = 1, std: float = 0.25, **changes) -> MuseGlimmerAssistantModel:
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    own = {"block_size": 5, "mask_token_id": vocab_size - 1, "target_layer_ids": [0, 2]}
    own |= {"num_hidden_layers": 2, "layer_types": KINDS}
    sizes = {name: size for name, size in SIZES.items() if name != "tie_word_embeddings"}
    return noisy(MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**{**sizes, **own, **changes})), std, seed)


def read_the_token_before(monkeypatch) -> None:
    """The mutant: what a draft reads of the target at a token is that of the token before."""
    between = Features.between

    def before(self, starts, ends):
        values, self.values = self.values, self.values.roll(1, dims=1)
        found, self.values = between(self, starts, ends), values
        return found

    monkeypatch.setattr(Features, "between", before)


def keep_rejected_tokens(monkeypatch) -> None:
    """The mutant: the features of accepted tokens are those of the end of the speculation."""
    add = Features.add
    monkeypatch.setattr(Features, "add", lambda self, features, accepted: add(self, features.roll(1, dims=1), accepted))


def agreement(
    pair, reference, length: int = 9, compared: int | None = None, ends=False, prepares=False, **settings
) -> list[bool]:
    """
    Decodes three rows with a draft, and returns for some rounds and rows whether the same tokens are drafted as by the
    `reference`, which takes the target, the draft, a text and a number of tokens: the first ones of a speculation that
    are `compared`, or all. With `ends` a row ends before the others, and prompts are read in chunks. A draft that
    `prepares` works ahead, and the tokens that it drafts just in time are compared, after hits too.
    """
    (target, draft), inputs, outputs = pair, padded_batch(3, length), []
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **options).sequences
    if ends:
        options |= {"eos_token_id": int(plain[1, length + 5]), "prefill_chunk_size": 4}
        plain = target.generate(**inputs, **options).sequences
        assert (plain[:, -1] == 0).sum() in (1, 2)
    config = hf_ssd.SSDConfig(**{"lookahead": 3, "on_draft_failure": "raise", **settings})
    options |= {"assistant_model": draft, "ssd_config": config}
    with preparing() if prepares else contextlib.nullcontext() as hits:
        drafted = drafted_in(lambda: outputs.append(target.generate(**inputs, **options)))
    stats = outputs[0].ssd_stats
    assert torch.equal(outputs[0].sequences, plain)
    assert {*stats.column("mode")} == {AHEAD if prepares else IN_TURN} and bool(hits and sum(hits)) == prepares
    assert max(stats.column("lookahead")) == config.lookahead
    found = [
        tokens[:compared] == reference(target, draft, torch.tensor(text), len(tokens))
        for text, tokens in [*drafted.items()][::2]
        if tokens
    ]
    assert len(found) > 5
    return found
