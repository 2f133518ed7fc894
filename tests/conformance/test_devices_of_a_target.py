"""Targets whose layers are on several devices. Offloading stands in for a second one: hooks move what a layer needs."""

import pytest
import torch
from transformers import AutoModelForCausalLM, set_seed

import hf_ssd

from ..helpers.tiny import padded_batch, tiny_model

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


def test_experts_take_the_path_that_plain_decoding_takes(target, draft, monkeypatch):
    """transformers changes how experts are computed between prefill and decoding, on devices other than the CPU."""
    events = []

    class Decoding:
        def __enter__(self):
            events.append("decoding")

        def __exit__(self, *_):
            events.append("restored")

    def positions(_, args, inputs):
        events.append(len(inputs["position_ids"][0]))

    monkeypatch.setattr(target, "_optimize_model_for_decode", Decoding)
    options = {"assistant_model": draft, "ssd_config": hf_ssd.SSDConfig(lookahead=3, asynchronous=False)}
    with target.register_forward_pre_hook(positions, with_kwargs=True):
        target.generate(torch.tensor([[3, 5, 7, 9, 11]]), max_new_tokens=12, **options)
    start = events.index("decoding")  # behind the prefill, and the trial that the hook brings
    assert events[start - 1] == 5 and events[-1] == "restored"
    assert set(events[start + 1 : -1]) <= {1, 2, 3, 4}
