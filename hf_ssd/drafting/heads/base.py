"""Heads: drafts that read hidden states of their target. All of them have one form, and are loaded in one way."""

from abc import abstractmethod

import torch
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutput

from ...cache.masks import additive


class Head(PreTrainedModel, GenerationMixin):
    """
    At each position a head reads a token and a *state*: what [`~Head.fuse`] makes of the target's hidden states at the
    token before, or its own output there. Its output is a state, of which [`~Head.logits`] makes the next token's.

    A subclass is published in folders, which it knows by `is_format`, builds without weights by `structure`, and reads
    by `load` onto the target's device, by default in its dtype; both raise `ValueError` for another target's head. Or
    models of transformers are made into it by `Head(model, target)`. Its config has `target_layers`,
    `target_width`, `target_keys` if it reads keys too, and `draft_vocab_size`, the number of tokens it can propose.
    """

    config_class = PreTrainedConfig
    base_model_prefix = ""
    _supports_sdpa = True
    title = "a head"  # in messages
    drafts_in_turn = False  # whether it drafts in the target's process alone
    model_types: tuple[str, ...] = ()  # of transformers

    @classmethod
    def is_assistant(cls, values: dict) -> bool:
        """Whether a model of transformers whose config has these values is made into such a head."""
        return values.get("model_type") in cls.model_types

    @classmethod
    def is_format(cls, path: str, values: dict) -> bool:
        """Whether a folder whose config has these values holds such a head."""
        return False

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Returns the states `(..., hidden_size)` of features, the target's hidden states `(..., target_width)`."""
        return features.to(self.device, self.dtype)

    def inputs(self, tokens: torch.LongTensor, states: torch.Tensor) -> torch.Tensor:
        """Returns the inputs of the forward pass for tokens `(...)` with a state each."""
        return torch.cat([self.get_input_embeddings()(tokens).to(states), states], dim=-1)

    @abstractmethod
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns logits of the target's tokens, -inf for a token that the head cannot propose."""

    @abstractmethod
    def read(self, inputs: torch.Tensor, position_ids, attention_mask, cache, logits_to_keep) -> torch.Tensor:
        """Returns the states after `inputs`, or after the last of them, as many as `logits_to_keep` needs."""

    def states_of(self, tokens: torch.LongTensor) -> torch.Tensor:
        """Returns states for tokens that are read alone, as in the trial of a model."""
        return self.get_input_embeddings().weight.new_zeros(*tokens.shape, self.config.hidden_size, dtype=self.dtype)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        cache=None,
        logits_to_keep: torch.LongTensor | int | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        """Returns the states `(rows, tokens, hidden_size)`. `input_ids` are those of [`~Head.inputs`], or tokens."""
        if input_ids.dim() == 2:
            input_ids = self.inputs(input_ids, self.states_of(input_ids))
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        states = self.read(input_ids, position_ids, attention_mask, cache, logits_to_keep)
        if isinstance(logits_to_keep, int):
            states = states[:, slice(-logits_to_keep, None)]
        elif logits_to_keep is not None:
            missing = input_ids.shape[1] - states.shape[1]
            states = states[:, logits_to_keep - missing if missing else logits_to_keep]
        return BaseModelOutput(states)

    def mask(self, attention_mask: torch.Tensor | dict | None, embeddings: torch.Tensor, cache):
        """Returns the mask of a layer that attends as layers of transformers do; `None` means causal."""
        kind = (getattr(self.config, "layer_types", None) or ["full_attention"])[0]
        if isinstance(attention_mask, dict):
            attention_mask = attention_mask[kind]
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = None  # of a single row without padding
        if attention_mask is None and kind == "sliding_attention":
            attention_mask = create_sliding_window_causal_mask(self.config, embeddings, None, cache)
        return attention_mask


def visible(mask: torch.Tensor | None, places: torch.LongTensor, seen: int, columns: int) -> torch.BoolTensor:
    """Returns which columns the new tokens at these places `(rows, tokens)` see, after `seen` others without a mask."""
    if mask is None or mask.dim() == 2:
        return torch.arange(columns, device=places.device) <= seen + places[:, :, None]
    return (mask[:, 0] >= 0).expand(len(places), -1, -1).gather(1, places[:, :, None].expand(-1, -1, mask.shape[-1]))


def masks_of_kinds(sees: torch.BoolTensor, distance: torch.Tensor, window: int, dtype: torch.dtype) -> dict:
    """Returns the mask of each kind of attention for tokens that see columns, at a distance from each."""
    of_kinds = {"full_attention": sees, "sliding_attention": sees & (distance.abs() <= window)}
    return {kind: additive(one, dtype) for kind, one in of_kinds.items()}
