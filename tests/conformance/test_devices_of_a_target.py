"""Targets whose layers are on several devices. Offloading stands in for a second one: hooks move what a layer needs."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, set_seed

import hf_ssd
from hf_ssd.generation import decoding

from ..conftest import SIZES, padded_batch, tiny_draft, tiny_model

PLACES = {
    "disk in the middle": {
        "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu"
    },
    "disk at both ends": {
        "model.embed_tokens": "disk", "model.layers.0": "disk", "model.layers.1": "cpu", "model.layers.2": "disk"
    },
}  # fmt: skip
BEHIND = {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}


@pytest.fixture(params=PLACES)
def offloaded(request, tmp_path):
    tiny_model().save_pretrained(tmp_path / "target")
    places = {**PLACES[request.param], **BEHIND}
    return hf_ssd.enable(
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "target", device_map=places, offload_folder=tmp_path / "disk"
        ).eval()
    )


def test_a_target_with_dispatch_hooks(offloaded, target, assistant):
    assert any(parameter.device.type == "meta" for parameter in offloaded.parameters())
    inputs, config = padded_batch(3), hf_ssd.SSDConfig(lookahead=3, budget=6)
    options = {"assistant_model": assistant, "ssd_config": config, "return_dict_in_generate": True}
    plain = offloaded.generate(**inputs, max_new_tokens=20, do_sample=False)
    greedy = offloaded.generate(**inputs, max_new_tokens=20, do_sample=False, **options)
    assert torch.equal(greedy.sequences, plain) and greedy.ssd_stats.hit_rate > 0
    sampled = []
    for model in (offloaded, target):
        set_seed(2)
        sampled.append(model.generate(**inputs, max_new_tokens=20, do_sample=True, **options).sequences)
    assert torch.equal(*sampled)


def test_experts_take_the_path_that_plain_decoding_takes(monkeypatch):
    """transformers changes how experts are computed between prefill and decoding, on devices other than the CPU."""
    changes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    target = hf_ssd.enable(MixtralForCausalLM(MixtralConfig(**{**SIZES, **changes})).eval())
    events, forward = [], target.forward

    class Decoding:
        def __enter__(self):
            events.append("decoding")

        def __exit__(self, *_):
            events.append("restored")

    monkeypatch.setattr(target, "_optimize_model_for_decode", Decoding)
    monkeypatch.setattr(target, "forward", lambda *rest, **inputs: events.append("forward") or forward(*rest, **inputs))
    monkeypatch.setattr(decoding, "check_supported", lambda model: None)
    config = hf_ssd.SSDConfig(lookahead=3, asynchronous=False)
    target.generate(torch.tensor([[3, 5, 7]]), max_new_tokens=6, assistant_model=tiny_draft(), ssd_config=config)
    assert events[:2] == ["forward", "decoding"] and events[-1] == "restored"
    assert set(events[2:-1]) == {"forward"}
