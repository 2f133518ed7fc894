"""Drafts in the format of z-lab are loaded without their code, and draft what their layers draft."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3Model

import hf_ssd

from ..helpers.assistants import agreement, noisy
from ..helpers.tiny import SIZES, padded_batch, tiny_model

QWEN = {**SIZES, "num_hidden_layers": 2, "rope_theta": 5000.0, "rope_scaling": None, "model_type": "qwen3"}
PUBLISHED = {"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
PUBLISHED |= {**QWEN, "block_size": 5, "dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 2]}}


class Published(torch.nn.Module):
    """Layers of Qwen3 that read a context and a block."""

    def __init__(self):
        super().__init__()
        model = noisy(Qwen3Model(Qwen3Config(**QWEN)), 0.25, 1)
        self.layers, self.norm, self.rotary_emb = model.layers, model.norm, model.rotary_emb
        self.fc = noisy(torch.nn.Linear(2 * QWEN["hidden_size"], QWEN["hidden_size"], bias=False), 0.25, 2)
        self.hidden_norm = type(model.norm)(QWEN["hidden_size"], eps=model.config.rms_norm_eps)

    def save(self, folder, **changes):
        (folder / "config.json").write_text(json.dumps({**PUBLISHED, **changes}))
        save_file({**self.state_dict()}, folder / "model.safetensors")
        return str(folder)

    @torch.no_grad()
    def drafted(self, target, draft, text: torch.LongTensor, count: int) -> list[int]:
        """Returns the tokens after a text. Attention reads the context beside the block, and sees all of both."""
        states = target(text[None, :-1], output_hidden_states=True).hidden_states
        context = self.hidden_norm(self.fc(torch.cat([states[1], states[3]], dim=-1)))
        hidden = target.get_input_embeddings()(torch.tensor([[int(text[-1]), 96, 96, 96, 96]]))
        places = torch.arange(len(text) + 4)[None]
        seen = torch.zeros(1, 1, len(text) + 4, len(text) + 4)
        for layer in self.layers:
            read = torch.cat([context, layer.input_layernorm(hidden)], dim=1)
            hidden = hidden + layer.self_attn(read, self.rotary_emb(read, places), seen)[0][:, -5:]
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return target.lm_head(self.norm(hidden))[0, 1:].argmax(-1)[:count].tolist()


@pytest.mark.slow
def test_a_published_draft_drafts_what_its_layers_draft(tmp_path):
    target, published = hf_ssd.enable(tiny_model("qwen3")), Published()

    def agrees(name, **changes):
        (tmp_path / name).mkdir()
        pair = target, published.save(tmp_path / name, **changes)
        return all(agreement(pair, published.drafted, lookahead=4))

    assert agrees("published")
    assert not agrees("other", dflash_config={**PUBLISHED["dflash_config"], "target_layer_ids": [0, 1]})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "differs in architectures from"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}, "differs in layer_types from"),
        ({"dflash_config": {"mask_token_id": 96, "causal": True}}, "differs in causal, target_layer_ids from"),
        ({"num_hidden_layers": 3}, "more or less than its config says, for example 'layers.2."),
        ({"num_hidden_layers": 1}, "more or less than its config says, for example 'layers.1."),
        ({"intermediate_size": 32}, "cannot be loaded: "),
    ],
)
def test_published_drafts_that_do_not_fit_are_refused(tmp_path, changes, reason):
    target, folder = hf_ssd.enable(tiny_model("qwen3")), Published().save(tmp_path, **changes)
    with pytest.raises(ValueError, match=reason):
        target.generate(**padded_batch(1), assistant_model=folder, ssd_config=hf_ssd.SSDConfig())


def test_a_published_draft_as_a_model_or_for_a_worker_is_refused(target, tmp_path):
    folder, words = Published().save(tmp_path), "pass its folder or hub id as `assistant_model`"
    for draft in (folder, Qwen3Model(Qwen3Config(**PUBLISHED))):
        with pytest.raises(ValueError, match=f"drafts in the target's process: {words}"):
            hf_ssd.launch_draft(draft)
    with pytest.raises(ValueError, match=words):
        target.generate(**padded_batch(1), assistant_model=draft, ssd_config=hf_ssd.SSDConfig())
