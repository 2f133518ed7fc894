"""Heads for multi-token prediction (MTP), which many models are published with: a layer that reads the last states."""

import copy
import re
import weakref

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.core_model_loading import WeightRenaming
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.modeling_layers import MtpModel
from transformers.modeling_outputs import BaseModelOutput

from .. import devices
from ..cache.cache_name import CACHE
from ..cache.hidden_states import decoder_parts

# The names of Qwen3-Next and Qwen3.5, whose MTP weights transformers skips, and the names in transformers' MTP layers.
QWEN = {
    r"^mtp\.layers\.0\.": "layers.0.mtp_block.",
    r"^mtp\.fc\.": "layers.0.eh_proj.",
    r"^mtp\.norm\.": "layers.0.post_norm.",
    r"^mtp\.pre_fc_norm_embedding\.": "layers.0.enorm.",
    r"^mtp\.pre_fc_norm_hidden\.": "layers.0.hnorm.",
}
_heads = weakref.WeakKeyDictionary()  # of targets
QWEN_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


class MtpHead(PreTrainedModel, GenerationMixin):
    """
    At each position the head reads a token and a state: the target's last hidden state at the token before, or its own
    output there where the target has not read that token yet. Its first layer is used for all tokens of a speculation.
    Embedding and output layer are the target's. See [`~hf_ssd.drafting.eagle_head.Eagle3Head`], whose methods these
    are.

    Args:
        mtp (`MtpModel`): The layers, in transformers' form.
        target (`PreTrainedModel`): The target.
    """

    base_model_prefix = ""
    _supports_sdpa = _supports_flash_attn = True

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
    def _can_set_attn_implementation(cls) -> bool:
        return True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def get_input_embeddings(self):
        return self.mtp.embed_tokens

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return features.to(self.mtp.layers[0].eh_proj.weight)

    def inputs(self, tokens: torch.LongTensor, states: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.mtp.embed_tokens(tokens).to(states), states], dim=-1)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.mtp._project_to_logits(states)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        cache=None,
        logits_to_keep: torch.LongTensor | int | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        if input_ids.dim() == 2:
            tokens = input_ids
            input_ids = self.inputs(tokens, self.fuse(tokens.new_zeros(*tokens.shape, self.config.hidden_size)))
        embeddings, states = input_ids.chunk(2, dim=-1)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        kinds = getattr(self.config, "layer_types", None) or ["full_attention"]
        if isinstance(attention_mask, dict):
            attention_mask = attention_mask[kinds[0]]
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = None  # of a single row without padding
        if attention_mask is None and kinds[0] == "sliding_attention":
            attention_mask = create_sliding_window_causal_mask(self.config, embeddings, None, cache)
        of_kind = {"layer_type": kinds[0]} if getattr(self.mtp, "has_per_layer_rope", False) else {}
        states = self.mtp.layers[0](
            embeddings,
            states,
            position_embeddings=self.mtp.rotary_emb(embeddings, position_ids=position_ids, **of_kind),
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CACHE: cache},
        )
        if getattr(self.mtp, "use_shared_post_norm", False):
            states = self.mtp.shared_post_norm(states)
        if logits_to_keep is not None:
            states = states[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]
        return BaseModelOutput(states)


class _QwenMtp(MtpModel):
    """Reads the MTP weights of Qwen3-Next and Qwen3.5."""

    @staticmethod
    def get_mtp_weights_regex(main_model: PreTrainedModel) -> re.Pattern:
        return re.compile(r"^mtp\.")

    def get_weight_conversions(self, main_model: PreTrainedModel) -> list:
        renamed = [WeightRenaming(source_patterns=theirs, target_patterns=ours) for theirs, ours in QWEN.items()]
        return renamed + super().get_weight_conversions(main_model)


def mtp_head_of(target: PreTrainedModel) -> MtpHead:
    """Returns the MTP head of a target, which is loaded once. See [`load_mtp_head`]."""
    head = _heads.get(target)
    if head is None or devices.of_model(head) != devices.of_model(target):
        head = _heads[target] = load_mtp_head(target)
    return head


def load_mtp_head(target: PreTrainedModel) -> MtpHead:
    """
    Loads the MTP layer of a target from the target's own checkpoint, onto the device of its last layer.

    Raises:
        `ValueError`: the target has no MTP layer, or its checkpoint has no weights of it.
    """
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
