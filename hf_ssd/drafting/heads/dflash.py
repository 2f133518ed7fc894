"""DFlash drafts, of transformers or z-lab: a block in one pass, with the target's states as keys and values."""

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from ...cache.cache_name import CACHE
from ...cache.cached_model import LONGEST_STEP
from .base import Head, masks_of_kinds, visible

SETTINGS = ("block_size", "mask_token_id", "target_layer_ids")
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
LAYERS = (*SIZES, "head_dim", "rms_norm_eps", "hidden_act", "rope_parameters", "max_position_embeddings", "layer_types")
WEIGHTS = {r"^fc\.": "encoder.fc.", r"^hidden_norm\.": "encoder.output_norm_enc."}  # and transformers' names
OF_TARGET = ("embed_tokens.", "lm_head.", "rotary_emb.")  # what a draft may hold as well, and does not need


class DFlashHead(Head):
    """
    Tokens that the target has read are fused states, of which layers make keys and values. The last token and mask
    tokens after it are a block, which each of them sees whole. Embedding and output layer are the target's.
    """

    title = "a DFlash draft"
    drafts_in_turn = True
    model_types = ("muse_glimmer_assistant",)

    def __init__(self, assistant: PreTrainedModel, target: PreTrainedModel):
        own, vocab_size = assistant.config, target.config.get_text_config(decoder=True).vocab_size
        if not 0 <= own.mask_token_id < vocab_size:
            raise ValueError(
                f"The draft's mask token {own.mask_token_id} is not in the vocabulary of {type(target).__name__} with "
                f"{vocab_size} tokens; use the target that the draft was made for."
            )
        config = PreTrainedConfig(
            vocab_size=vocab_size,
            hidden_size=own.hidden_size + 1,
            num_hidden_layers=own.num_hidden_layers,
            max_position_embeddings=own.max_position_embeddings,
            rope_parameters=own.rope_parameters,
            block_size=own.block_size,
            pard_token=own.mask_token_id,
            target_layers=[layer + 1 for layer in own.target_layer_ids],
            target_width=len(own.target_layer_ids) * own.hidden_size,
            attn_implementation=own._attn_implementation,
            dtype=assistant.dtype,
        )
        super().__init__(config)
        self.assistant, self.embed_tokens = assistant, target.get_input_embeddings()
        self.lm_head = target.get_output_embeddings()

    @classmethod
    def is_format(cls, path, values):
        return values.get("dflash_config") is not None

    @classmethod
    def structure(cls, path, values, target):
        return cls(MuseGlimmerAssistantModel(_config_of(path, values)), target)

    @classmethod
    def load(cls, path, values, target, dtype=None):
        config, place = _config_of(path, values), target.get_input_embeddings().weight.device
        options = {"config": config, "key_mapping": WEIGHTS, "dtype": dtype or target.dtype}
        try:
            draft, found = MuseGlimmerAssistantModel.from_pretrained(
                path, **options, output_loading_info=True, device_map={"": place}
            )
            more = {name for name in found["unexpected_keys"] if not name.startswith(OF_TARGET)}
        except (OSError, RuntimeError) as error:
            raise ValueError(f"The DFlash draft {path!r} cannot be loaded: {error}") from error
        if names := sorted({*found["missing_keys"], *more}):
            raise ValueError(
                f"The DFlash draft {path!r} cannot be loaded: its weights have more or less than its config says, for "
                f"example {names[0]!r}."
            )
        return cls(draft.requires_grad_(False), target).eval()

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Returns fused features, and a 1."""
        fused = self.assistant.encoder(features.to(self.assistant.encoder.fc.weight))
        return torch.cat([fused, torch.ones_like(fused[..., :1])], dim=-1)

    def inputs(self, tokens: torch.LongTensor, states: torch.Tensor) -> torch.Tensor:
        """Returns states, or embeddings of tokens without one, and how many tokens after it in its block each sees."""
        embed = self.embed_tokens
        embedded = nn.Embedding.forward(embed, tokens) if hasattr(embed, "embed_norm") else embed(tokens)
        embedded = pad(embedded.to(self.dtype), (0, 1))
        return pad(torch.where(states[..., -1:] > 0, states, embedded), (0, 1))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        place = self.lm_head.weight.device
        return self.lm_head(states.to(place, self.embed_tokens.weight.dtype)).to(states.device)

    def read(self, inputs, position_ids, attention_mask, cache, logits_to_keep):
        """Tokens before the first one in `logits_to_keep` are not in a block."""
        inputs, known, ahead = inputs.tensor_split((-2, -1), dim=-1)
        first = 0
        if logits_to_keep is not None and inputs.shape[1] > LONGEST_STEP:  # a prompt, whose tokens ask nothing
            is_count = isinstance(logits_to_keep, int)
            first = inputs.shape[1] - logits_to_keep if is_count else int(logits_to_keep[0])
        seen = 0 if cache is None else cache.get_seq_length()
        masks = self._masks(ahead[:, first:, 0].long(), first, attention_mask, seen, inputs)
        model = self.assistant
        positions = model.rotary_emb(inputs, position_ids)
        hidden, is_known = inputs[:, first:], known[:, first:] > 0
        for layer, kind in zip(model.layers, model.config.layer_types):
            output, _ = layer.self_attn(
                hidden_states=torch.where(is_known, inputs[:, first:], layer.input_layernorm(hidden)),
                context_hidden_states=inputs[:, :first],
                position_embeddings=positions,
                attention_mask=masks[kind],
                **{CACHE: cache},
            )
            hidden = hidden + output
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return model.norm(hidden)

    def _masks(self, ahead: torch.LongTensor, first: int, mask: torch.Tensor | None, seen: int, inputs: torch.Tensor):
        """Returns the masks of the new tokens from number `first` on, which see as the token `ahead` tokens later."""
        count = inputs.shape[1]
        own = torch.arange(first, count, device=inputs.device).expand_as(ahead)
        last = (own + ahead).clamp(max=count - 1)
        causal, sees = (visible(mask, places, seen, seen + count) for places in (own, last))
        # A token's distance from a column is counted in columns that it sees.
        distance = causal.sum(dim=2, keepdim=True) - sees.cumsum(dim=2)
        return masks_of_kinds(sees, distance, self.assistant.config.sliding_window, inputs.dtype)


def _config_of(path: str, values: dict) -> MuseGlimmerAssistantConfig:
    """Returns the config for transformers. Raises `ValueError` if the draft has other layers or settings."""
    own = values["dflash_config"]
    layers, settings = Qwen3Config(**values), {"block_size": 16, **values, **own}
    differ = {
        "architectures": values.get("architectures") != ["DFlashDraftModel"],
        "model_type": values.get("model_type") != "qwen3",
        "layer_types": {*layers.layer_types} != {"full_attention"},
        "attention_bias": layers.attention_bias,
        **{name: name not in SETTINGS for name in own},
        **{name: True for name in SETTINGS if settings.get(name) is None},
    }
    if any(differ.values()):
        raise ValueError(
            f"The DFlash draft {path!r} is not supported: its config differs in "
            f"{', '.join(name for name, differs in differ.items() if differs)} from those of drafts with Qwen3 layers "
            "and full attention; use an EAGLE-3 head or a small model of the target's family."
        )
    return MuseGlimmerAssistantConfig(
        **{name: getattr(layers, name) for name in LAYERS}, **{name: settings[name] for name in SETTINGS}
    )
