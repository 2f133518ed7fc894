"""Heads for multi-token prediction (MTP), which many models are published with: a layer that reads the last states."""

import copy
import re

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_layers import MtpModel

from ... import devices
from ...cache.cache_name import CACHE
from ...cache.hidden_states import decoder_parts
from .base import Head

# The names of Qwen3-Next and Qwen3.5, whose MTP weights transformers skips, and the names in transformers' MTP layers.
QWEN = {
    r"^mtp\.layers\.0\.": "layers.0.mtp_block.",
    r"^mtp\.fc\.": "layers.0.eh_proj.",
    r"^mtp\.norm\.": "layers.0.post_norm.",
    r"^mtp\.pre_fc_norm_embedding\.": "layers.0.enorm.",
    r"^mtp\.pre_fc_norm_hidden\.": "layers.0.hnorm.",
}
QWEN_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


class MtpHead(Head):
    """The target's own layers as a head. The first drafts all tokens; embedding and output layer are the target's."""

    title = "an MTP layer"
    drafts_in_turn = True
    _supports_flash_attn = True

    def __init__(self, mtp: MtpModel, target: PreTrainedModel):
        config = copy.deepcopy(mtp.config)
        config.num_hidden_layers = 1
        for name in ("layer_types", "mlp_layer_types"):
            if getattr(config, name, None) is not None:
                setattr(config, name, getattr(config, name)[:1])
        config.target_layers, config.target_width = [len(decoder_parts(target)[0])], config.hidden_size
        config.draft_vocab_size = config.vocab_size
        super().__init__(config)
        self.mtp = mtp

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for experts in the file of the class

    def get_input_embeddings(self):
        return self.mtp.embed_tokens

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.mtp._project_to_logits(states)

    def read(self, inputs, position_ids, attention_mask, cache, logits_to_keep):
        embeddings, states = inputs.chunk(2, dim=-1)
        kinds = getattr(self.config, "layer_types", None) or ["full_attention"]
        of_kind = {"layer_type": kinds[0]} if getattr(self.mtp, "has_per_layer_rope", False) else {}
        states = self.mtp.layers[0](
            embeddings,
            states,
            position_embeddings=self.mtp.rotary_emb(embeddings, position_ids=position_ids, **of_kind),
            attention_mask=self.mask(attention_mask, embeddings, cache),
            position_ids=position_ids,
            **{CACHE: cache},
        )
        return self.mtp.shared_post_norm(states) if getattr(self.mtp, "use_shared_post_norm", False) else states


class _QwenMtp(MtpModel):
    """Reads the MTP weights of Qwen3-Next and Qwen3.5."""

    @staticmethod
    def get_mtp_weights_regex(main_model: PreTrainedModel) -> re.Pattern:
        return re.compile(r"^mtp\.")

    def get_weight_conversions(self, main_model: PreTrainedModel) -> list:
        renamed = [WeightRenaming(source_patterns=theirs, target_patterns=ours) for theirs, ours in QWEN.items()]
        return renamed + super().get_weight_conversions(main_model)


def load_mtp_head(target: PreTrainedModel) -> MtpHead:
    """Loads the MTP layer from the target's own checkpoint, onto its last layer's device, or raises `ValueError`."""
    name, text = type(target).__name__, target.config.get_text_config(decoder=True)
    kind, source = MtpModel, target
    if text.model_type in QWEN_TYPES:
        kind, source = _QwenMtp, copy.copy(target)  # whose config says that it has the layer
        source.config = copy.deepcopy(target.config)
        own = source.config.get_text_config(decoder=True)
        own.num_mtp_layers, own.mtp_layer_types, own.mtp_mlp_layer_types = 1, ["full_attention"], None
        if getattr(own, "mlp_layer_types", None) is not None:
            own.mtp_mlp_layer_types = own.mlp_layer_types[-1:]
    elif not getattr(text, "num_mtp_layers", None):
        raise ValueError(f'{name} has no layer for multi-token prediction; use another `drafter` than "mtp".')
    device = devices.of_model(target)
    try:
        mtp = kind.from_pretrained(source, device_map={"": device})
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"The MTP layer of {name} cannot be loaded from {target.config.name_or_path!r}; load the model from a "
            f'checkpoint that has it, or use another `drafter` than "mtp". ({error})'
        ) from error
    return MtpHead(mtp, target).eval().requires_grad_(False)
