"""Tiny EAGLE-3 heads for the tiny models, and heads that know the target's text."""

import copy

import pytest
import torch
from transformers.modeling_layers import MtpModel

from hf_ssd.drafting.drafter import Completion
from hf_ssd.drafting.head_drafter import HeadDrafter
from hf_ssd.drafting.heads.eagle3 import Eagle3Head, head_config
from hf_ssd.drafting.heads.mtp import MtpHead
from hf_ssd.drafting.parallel_drafter import BlockDrafter

from .tiny import SIZES

LAYERS = [1, 2, 3]


def tiny_head(target, seed: int = 3, draft_vocab: int | None = None, layers=LAYERS, **changes) -> Eagle3Head:
    """A random head for a tiny target, whose vocabulary is a part of the target's."""
    torch.manual_seed(seed)
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    draft_vocab = draft_vocab or vocab_size - 2
    values = {**SIZES, "num_hidden_layers": 1, "vocab_size": vocab_size, "model_type": "llama", **changes}
    values |= {"draft_vocab_size": draft_vocab, "eagle_aux_hidden_state_layer_ids": list(layers)}
    values["hidden_size"] = target.config.get_text_config(decoder=True).hidden_size
    head = Eagle3Head(head_config(values, target))
    with torch.no_grad():
        head.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        own = torch.randperm(vocab_size)[:draft_vocab].sort().values
        head.d2t.copy_(own - torch.arange(draft_vocab))
    return head.eval()


def tiny_mtp_head(target, seed: int = 3) -> MtpHead:
    """A random MTP layer of a target that has none."""
    torch.manual_seed(seed)
    with_layer = copy.copy(target)
    with_layer.config = copy.deepcopy(target.config)
    with_layer.config.num_mtp_layers = 1
    return MtpHead(MtpModel(with_layer, 1), target).eval()


def expected_features(model, text: torch.LongTensor, layers=LAYERS) -> torch.Tensor:
    """The hidden states of a plain pass over a text that a head reads."""
    states = model(input_ids=text[None], use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in layers], dim=-1)


def knows(monkeypatch, texts: list[list[int]], wrong_every: int = 4) -> None:
    """
    Lets drafters that complete a speculation token by token draft from these texts, one for each row, with a wrong
    token in one of `wrong_every` places.
    """
    add = Completion.add

    def knowing(self, depth, token, *others):
        lengths = self.drafter.prefix.lengths
        for row, text in enumerate(texts):
            place = lengths[row] + depth
            if place < len(text) and place % wrong_every:
                token[row] = text[place]
        add(self, depth, token, *others)

    monkeypatch.setattr(Completion, "add", knowing)


def drafted_in(call) -> dict[tuple, list[int]]:
    """The tokens that heads draft just in time in a call, by the verified tokens of the row."""
    drafted = {}

    def spied(complete):
        def spy(self, ready, width, plan):
            prefix = self.prefix
            texts = [tuple(ids[:n].tolist()) for ids, n in zip(prefix.ids.values, prefix.lengths)]
            speculation, steps = complete(self, ready, width, plan)
            for row in prefix.rows:
                if not ready.tokens[row]:
                    drafted[texts[row]] = speculation.tokens[row]
            return speculation, steps

        return spy

    with pytest.MonkeyPatch.context() as patch:
        for kind in (HeadDrafter, BlockDrafter):
            patch.setattr(kind, "complete", spied(kind.complete))
        call()
    return drafted
