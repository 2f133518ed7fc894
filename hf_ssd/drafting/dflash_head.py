"""DFlash drafts: all tokens of a block in one pass, with hidden states of the target as keys and values."""

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ..cache.cache_name import CACHE
from ..cache.model_runner import LONGEST_STEP


class DFlashHead(PreTrainedModel, GenerationMixin):
    """
    A DFlash draft of transformers in the form of a head, see [`~hf_ssd.drafting.eagle_head.Eagle3Head`], whose methods
    these are. A token that the target has read is a state, its fused hidden states, of which each layer makes keys and
    values. The last token, which the target has not read, and mask tokens after it are a block: their embeddings go
    through the layers, and each of them sees the whole block. Embedding and output layer are the target's.

    Args:
        assistant (`MuseGlimmerAssistantModel`): The draft.
        target (`PreTrainedModel`): The target.

    Raises:
        `ValueError`: the mask token of the draft is not in the target's vocabulary.
    """

    config_class = PreTrainedConfig
    base_model_prefix = ""
    _supports_sdpa = True

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
        )
        config.rope_parameters, config.block_size = own.rope_parameters, own.block_size
        config.target_layers = [layer + 1 for layer in own.target_layer_ids]
        config.target_width, config.pard_token = len(config.target_layers) * own.hidden_size, own.mask_token_id
        config.drafts_in_turn = True
        config._attn_implementation, config.dtype = own._attn_implementation, assistant.dtype
        super().__init__(config)
        self.assistant, self.embed_tokens = assistant, target.get_input_embeddings()
        self.lm_head = target.get_output_embeddings()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Returns the states of features: the fused features, and a 1."""
        fused = self.assistant.encoder(features.to(self.assistant.encoder.fc.weight))
        return torch.cat([fused, torch.ones_like(fused[..., :1])], dim=-1)

    def inputs(self, tokens: torch.LongTensor, states: torch.Tensor) -> torch.Tensor:
        """Returns states, and for tokens whose states are zeros their embeddings."""
        return torch.where(states[..., -1:] > 0, states, self._embedded(tokens))

    def _embedded(self, tokens: torch.LongTensor) -> torch.Tensor:
        """Returns the embeddings without the normalization that some targets have, and a 0."""
        embed = self.embed_tokens
        embedded = nn.Embedding.forward(embed, tokens) if hasattr(embed, "embed_norm") else embed(tokens)
        embedded = embedded.to(self.dtype)
        return torch.cat([embedded, torch.zeros_like(embedded[..., :1])], dim=-1)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        place = self.lm_head.weight.device
        return self.lm_head(states.to(place, self.embed_tokens.weight.dtype)).to(states.device)

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
            input_ids (`torch.Tensor` of shape `(rows, tokens, hidden_size + 1)`): What [`~DFlashHead.inputs`] returns,
                and for each token how many of the tokens after it, the rest of its block, it sees. Or tokens
                `(rows, tokens)`, none of which sees tokens after it.
            position_ids, attention_mask, cache, logits_to_keep: As in models of transformers. Tokens before
                the first one in `logits_to_keep` are not in a block.

        Returns:
            `BaseModelOutput`: Its `last_hidden_state` has the shape `(rows, tokens, hidden_size - 1)`.
        """
        if input_ids.dim() == 2:
            embedded = self._embedded(input_ids)
            input_ids = torch.cat([embedded, embedded[..., -1:]], dim=-1)
        inputs, known, ahead = input_ids.tensor_split((-2, -1), dim=-1)
        if position_ids is None:
            position_ids = torch.arange(inputs.shape[1], device=inputs.device)[None]
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
        states = model.norm(hidden)
        if isinstance(logits_to_keep, int):
            states = states[:, -logits_to_keep:]
        elif logits_to_keep is not None:
            states = states[:, logits_to_keep - first]
        return BaseModelOutput(states)

    def _masks(self, ahead: torch.LongTensor, first: int, mask: torch.Tensor | None, seen: int, inputs: torch.Tensor):
        """
        Returns the mask of each kind of attention for the new tokens from number `first` on, each of which sees what
        the token `ahead` `(rows, tokens)` tokens after it sees.
        """
        count, device = inputs.shape[1], inputs.device
        own = torch.arange(first, count, device=device).expand_as(ahead)
        last = (own + ahead).clamp(max=count - 1)
        if mask is None or mask.dim() == 2:  # no padding, and the last columns are those of the inputs
            columns = torch.arange(seen + count, device=device)
            causal, sees = (columns <= seen + one[:, :, None] for one in (own, last))
        else:
            visible = mask[:, 0].expand(len(ahead), -1, -1) >= 0
            causal, sees = (visible.gather(1, one[:, :, None].expand(-1, -1, mask.shape[-1])) for one in (own, last))
        # A token's distance from a column is counted in columns that it sees.
        distance = causal.sum(dim=2, keepdim=True) - sees.cumsum(dim=2)
        of_kinds = {
            "full_attention": sees,
            "sliding_attention": sees & (distance.abs() <= self.assistant.config.sliding_window),
        }
        lowest = torch.finfo(inputs.dtype).min
        return {kind: torch.where(one, 0.0, lowest).to(inputs.dtype)[:, None] for kind, one in of_kinds.items()}
