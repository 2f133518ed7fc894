"""EAGLE-3 heads: a draft of a single layer that reads hidden states of its target (Li et al., NeurIPS 2025)."""

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from ..cache.cache_name import CACHE


class Eagle3Head(PreTrainedModel, GenerationMixin):
    """
    At each position the head reads a token and a state: the fused hidden states of the target at the token before, or
    its own output there where the target has not read that token yet. Its output is a state, from which
    [`~Eagle3Head.logits`] gives the distribution of the next token.

    Args:
        config (`PreTrainedConfig`): The config of a model with the same kind of layers, such as `LlamaConfig`, and of
            the target's vocabulary. Further attributes are `target_layers` and `target_width`, see
            [`~hf_ssd.drafting.needs.DraftInfo`]; `draft_vocab_size`, the number of tokens that the head can propose;
            and `norm_before_residual`, `norm_before_fc`, `fc_norm` and `norm_output`, which are `False` by default.
    """

    config_class = PreTrainedConfig
    base_model_prefix = ""
    _supports_sdpa = True
    _supports_flash_attn = False

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        decoder, size = MODEL_MAPPING[type(config)](config), config.hidden_size
        self.embed_tokens, self.norm, self.rotary_emb = decoder.embed_tokens, decoder.norm, decoder.rotary_emb
        self.layers = decoder.layers
        attention, kind = self.layers[0].self_attn, type(self.norm)
        for name in ("q_proj", "k_proj", "v_proj"):
            before = getattr(attention, name)
            setattr(attention, name, nn.Linear(2 * size, before.out_features, bias=before.bias is not None))
        self.layers[0].hidden_norm = kind(size, eps=config.rms_norm_eps)
        self.input_norm = self.fc_norm = None
        if getattr(config, "norm_before_fc", False):
            self.input_norm = kind(config.target_width, eps=config.rms_norm_eps)
        if getattr(config, "fc_norm", False):
            layers = len(config.target_layers)
            norms = [kind(config.target_width // layers, eps=config.rms_norm_eps) for _ in range(layers)]
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(config.target_width, size, bias=False)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        # For each token of the head, the number that is added to it to give the target's token.
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    @property
    def _returns_normed(self) -> bool:
        return getattr(self.config, "norm_output", False)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Returns the states `(..., hidden_size)` of features `(..., target_width)`, the target's hidden states."""
        features = features.to(self.fc.weight)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            of_layers = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(of_layer) for norm, of_layer in zip(self.fc_norm, of_layers)], dim=-1)
        return self.fc(features)

    def inputs(self, tokens: torch.LongTensor, states: torch.Tensor) -> torch.Tensor:
        """Returns the inputs `(..., 2 * hidden_size)` for tokens `(...)` with a state each."""
        return torch.cat([self.embed_tokens(tokens), states], dim=-1)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns logits of the target's tokens, -inf for a token that the head cannot propose."""
        own = self.lm_head(states if self._returns_normed else self.norm(states))
        if self.config.draft_vocab_size == self.config.vocab_size:
            return own
        of_all = own.new_full((*own.shape[:-1], self.config.vocab_size), -torch.inf)
        of_all[..., torch.arange(len(self.d2t), device=own.device) + self.d2t] = own
        return of_all

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache=None,
        logits_to_keep: torch.LongTensor | int | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        """
        Args:
            input_ids (`torch.Tensor` of shape `(rows, tokens, 2 * hidden_size)`): What [`~Eagle3Head.inputs`] returns.
                Or tokens `(rows, tokens)`, whose states are zeros.
            position_ids, attention_mask, cache, logits_to_keep: As in models of transformers.

        Returns:
            `BaseModelOutput`: Its `last_hidden_state` has the shape `(rows, tokens, hidden_size)`.
        """
        size = self.config.hidden_size
        if input_ids.dim() == 2:
            states = self.embed_tokens.weight.new_zeros(*input_ids.shape, size)
            input_ids = self.inputs(input_ids, states)
        embeddings, states = input_ids.split(size, dim=-1)
        layer = self.layers[0]
        normed = layer.hidden_norm(states)
        residual = normed if getattr(self.config, "norm_before_residual", False) else states
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = None  # of a single row without padding
        if attention_mask is None and "sliding_attention" in (getattr(self.config, "layer_types", None) or []):
            attention_mask = create_sliding_window_causal_mask(self.config, embeddings, None, cache)
        output, _ = layer.self_attn(
            hidden_states=torch.cat([layer.input_layernorm(embeddings), normed], dim=-1),
            position_embeddings=self.rotary_emb(embeddings, position_ids),
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CACHE: cache},
        )
        states = residual + output
        states = states + layer.mlp(layer.post_attention_layernorm(states))
        if self._returns_normed:
            states = self.norm(states)
        if logits_to_keep is not None:
            states = states[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]
        return BaseModelOutput(states)
