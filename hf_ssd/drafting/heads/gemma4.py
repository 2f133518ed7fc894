"""Gemma 4 assistants: drafts that attend to the keys and values of their target, and have none of their own."""

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ...cache.hidden_states import decoder_parts, layers_that_share_keys
from .base import Head, masks_of_kinds, visible

KINDS = ("full_attention", "sliding_attention")


class Gemma4Head(Head):
    """
    An assistant in the form of a head. A state of the target also has the token's keys and values in two layers, which
    become the head's cache. All tokens of a speculation attend to those of verified tokens, from their last position.
    """

    title = "an assistant"
    drafts_in_turn = True
    model_types = ("gemma4_assistant", "gemma4_unified_assistant")

    def __init__(self, assistant: PreTrainedModel, target: PreTrainedModel):
        own, text = assistant.config.get_text_config(), target.config.get_text_config(decoder=True)
        shared = layers_that_share_keys(target)
        layers = decoder_parts(target)[0]
        heads = {kind: layers[layer].self_attn for kind, layer in shared.items()}
        fits = assistant.config.backbone_hidden_size == text.hidden_size and own.vocab_size <= text.vocab_size
        of_assistant = {layer.self_attn.layer_type: layer.self_attn.head_dim for layer in assistant.model.layers}
        if not fits or any(kind not in heads or heads[kind].head_dim != dim for kind, dim in of_assistant.items()):
            raise ValueError(
                f"The assistant does not fit {type(target).__name__}: their hidden sizes, heads, kinds of attention or "
                "vocabularies differ; use the assistant that was published with the target."
            )
        # For each kind of attention the shape of its keys, and of its values, which are the same.
        used = [(kind, heads[kind].head_dim, heads[kind].k_proj.out_features) for kind in KINDS if kind in heads]
        shapes = {kind: (size // dim, dim) for kind, dim, size in used}
        keys = [size for _, _, size in used for _ in range(2)]
        hidden = assistant.config.backbone_hidden_size
        config = PreTrainedConfig(
            vocab_size=own.vocab_size,
            hidden_size=hidden + sum(keys) + 1 + own.hidden_size,
            num_hidden_layers=len(shapes) + 1,
            max_position_embeddings=own.max_position_embeddings,
            target_layers=[len(layers)],
            target_keys=[shared[kind] for kind in shapes],
            target_width=hidden + sum(keys),
            draft_vocab_size=own.vocab_size,
            attn_implementation=own._attn_implementation,
            dtype=assistant.dtype,
        )
        super().__init__(config)
        self.assistant, self.embed_tokens = assistant, target.get_input_embeddings()
        self.shapes, self.parts = shapes, [hidden, *keys, 1]

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Returns the features, then a 1 for a token whose keys are known, then zeros."""
        features = features.to(self.dtype)
        rest = features.new_zeros(*features.shape[:-1], self.config.hidden_size - features.shape[-1])
        rest[..., 0] = 1
        return torch.cat([features, rest], dim=-1)

    def inputs(self, tokens: torch.LongTensor, states: torch.Tensor) -> torch.Tensor:
        return super().inputs(tokens, states[..., : sum(self.parts)])

    def states_of(self, tokens):
        features = self.embed_tokens(tokens)
        repeats = -(-self.config.target_width // features.shape[-1])
        return self.fuse(features.repeat(1, 1, repeats)[..., : self.config.target_width])

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        states = states[..., sum(self.parts) :]
        if self.assistant.masked_embedding is not None:
            return self.assistant.masked_embedding(states, self.assistant.lm_head.weight)
        return self.assistant.lm_head(states)

    def read(self, inputs, position_ids, attention_mask, cache, logits_to_keep):
        embeddings, *read = inputs.split([self.parts[0], *self.parts], dim=-1)
        state, known, keys_and_values = read[0], read[-1][:, None], iter(read[1:-1])
        shared = {}
        for index, (kind, shape) in enumerate(self.shapes.items()):
            keys, values = (next(keys_and_values).unflatten(-1, shape).transpose(1, 2) for _ in range(2))
            shared[kind] = keys, values
            if cache is not None:
                shared[kind] = cache.update(keys, values, index)
        if cache is not None:
            known, _ = cache.update(known, known, len(self.shapes))
        masks, positions = self._masks(known[:, :, :, 0] > 0, attention_mask, inputs)
        outputs = self.assistant.model(
            inputs_embeds=self.assistant.pre_projection(torch.cat([embeddings, state], dim=-1)),
            attention_mask=masks,
            position_ids=positions,
            shared_kv_states=shared,
            use_cache=False,
            logits_to_keep=None,  # all: a number would leave out tokens in layers that read keys of others
        )
        hidden = outputs.last_hidden_state
        projected = self.assistant.post_projection(hidden)
        zeros = hidden.new_zeros(*hidden.shape[:-1], sum(self.parts) - self.parts[0])
        return torch.cat([projected, zeros, hidden], dim=-1)

    def _masks(self, known: torch.BoolTensor, mask: torch.Tensor | None, inputs: torch.Tensor):
        """Returns the masks, and the positions of the new tokens: how many `known` columns each of them sees."""
        count, columns = inputs.shape[1], known.shape[2]
        places = torch.arange(count, device=inputs.device).expand(len(inputs), -1)
        sees = visible(mask, places, columns - count, columns)[:, :, :columns] & known
        positions = sees.sum(dim=2)
        distance = positions[:, :, None] - sees.cumsum(dim=2)
        window = self.assistant.config.get_text_config().sliding_window
        return masks_of_kinds(sees, distance, window, inputs.dtype), positions
