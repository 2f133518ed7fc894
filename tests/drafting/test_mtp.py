"""Multi-token prediction: the layer comes from the target's own checkpoint, and drafts as transformers' loop does."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import hf_ssd
from hf_ssd.cache import recurrent
from hf_ssd.drafting.heads import mtp
from hf_ssd.drafting.heads.loading import mtp_head_of

from ..helpers.assistants import agreement
from ..helpers.families import sharp_model, tiny_config
from ..helpers.tiny import SIZES, padded_batch

KINDS = ["deepseek_v3", "glm4_moe", "qwen3_next"]


def name_in_checkpoint(name: str, layers: int | None) -> str:
    """Returns the published name of a weight of transformers' MTP layer, which some families count as a layer."""
    if layers is not None:
        name = name.replace("layers.0.", f"model.layers.{layers}.").replace("mtp_block.", "")
        return name.replace("post_norm.", "shared_head.norm.")
    for theirs, ours in mtp.QWEN.items():
        if name.startswith(ours):
            return theirs.strip("^").replace("\\", "") + name.removeprefix(ours)


def without_the_layer(kind: str):
    """A target whose config says that it has the layer, if that is said in its family."""
    config = tiny_config(kind)
    config.num_nextn_predict_layers = 1
    if kind in mtp.QWEN_TYPES:  # the last layer has attention
        config.num_hidden_layers, config.layer_types = 2, ["linear_attention", "full_attention"]
    return sharp_model(config)


def per_expert(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the weights of the experts one by one, as checkpoints have them."""
    if name.endswith(".experts.gate_up_proj"):
        stem, parts = name.removesuffix("gate_up_proj"), ("gate_proj", "up_proj")
        return {
            f"{stem}{expert}.{part}.weight": half.clone()
            for expert, both in enumerate(tensor)
            for part, half in zip(parts, both.chunk(2))
        }
    if name.endswith(".experts.down_proj"):
        stem = name.removesuffix("down_proj")
        return {f"{stem}{expert}.down_proj.weight": one.clone() for expert, one in enumerate(tensor)}
    return {name: tensor.clone()}


def test_a_layer_with_a_sliding_window_keeps_to_it_in_its_first_pass():
    pytest.importorskip("transformers.models.mellum")
    torch.manual_seed(0)
    kinds = ["full_attention", "sliding_attention"]
    few = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "sliding_window": 4}
    sizes = {**SIZES, **few, "num_hidden_layers": 2, "num_mtp_layers": 1, "layer_types": kinds}
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model("mellum", **sizes)).eval()
    theirs = MtpModel(target, 1).eval()
    for parameter in theirs.layers.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    head = mtp.MtpHead(theirs, target)
    assert head.config.layer_types == ["sliding_attention"]
    inputs, place = head.inputs(torch.arange(12)[None], torch.randn(1, 12, SIZES["hidden_size"])), torch.arange(12)
    distance = place[:, None] - place
    with torch.no_grad():
        full, windowed = (
            head(inputs, attention_mask=torch.where((distance >= 0) & (distance < window), 0.0, -torch.inf)[None, None])
            for window in (12, 4)
        )
        first = head(inputs).last_hidden_state
    torch.testing.assert_close(first, windowed.last_hidden_state, atol=1e-5, rtol=0)
    assert not torch.allclose(first, full.last_hidden_state, atol=1e-3)


@pytest.fixture(
    scope="module", params=["qwen3_5_text", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS)]
)
def published(request, tmp_path_factory):
    """A target that was loaded from a checkpoint with an MTP layer, and transformers' model of that layer."""
    torch.manual_seed(0)
    kind, folder = request.param, tmp_path_factory.mktemp("published")
    original = without_the_layer(kind)
    layers = None if kind in mtp.QWEN_TYPES else original.config.num_hidden_layers
    shadow = copy.copy(original)
    if layers is None:
        shadow.config = copy.deepcopy(original.config)
        shadow.config.num_mtp_layers, shadow.config.mtp_layer_types = 1, ["full_attention"]
    theirs = MtpModel(shadow, 1).eval()
    for parameter in theirs.layers.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    original.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    for name, tensor in theirs.layers.state_dict(prefix="layers.").items():
        for own, of_expert in per_expert(name, tensor).items():
            state[name_in_checkpoint(own, layers)] = of_expert
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        if layers is not None:  # transformers names the layers of the published sizes
            patch.setattr(type(original), "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{layers}\."])
        target = AutoModelForCausalLM.from_pretrained(folder).eval()
        mtp_head_of(target)
    return hf_ssd.enable(target), theirs


def drafted_by_transformers(target, theirs, text: torch.LongTensor, count: int) -> list[int]:
    """Returns the token that transformers' MTP model drafts after a text."""
    with torch.no_grad():
        hidden = target(text[None, :-1], output_hidden_states=True).hidden_states[-1]
        positions = torch.arange(1, len(text))[None]
        tokens, _, _ = theirs(text[None, 1:], hidden, None, positions, MtpCache(config=theirs.config))
    return [int(tokens[0, 0])]


def agrees(published) -> list[bool]:
    """Whether the first token of each speculation is the one that transformers drafts."""
    target, theirs = published
    reference = lambda target, _, *text: drafted_by_transformers(target, theirs, *text)  # noqa: E731
    return agreement((target, None), reference, compared=1, drafter="mtp")


@pytest.mark.parametrize("most_fed_again", [6, recurrent.WORTH_A_PASS])  # in a model with recurrent layers
def test_the_layer_of_the_checkpoint_drafts_as_transformers_does(published, most_fed_again, monkeypatch):
    monkeypatch.setattr(recurrent, "WORTH_A_PASS", most_fed_again)
    assert all(agrees(published))


def test_states_of_another_layer_are_noticed(published, monkeypatch):
    """The mutant: the head reads the states after the first layer."""
    monkeypatch.setattr(mtp_head_of(published[0]).config, "target_layers", [1])
    assert not all(agrees(published))


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_target_without_the_layer_is_refused_in_one_sentence(target, is_loaded, tmp_path):
    words = "has no layer for multi-token prediction"
    if is_loaded:  # of a kind that has one
        without_the_layer("glm4_moe").save_pretrained(tmp_path)
        target, words = hf_ssd.enable(AutoModelForCausalLM.from_pretrained(tmp_path)), "cannot be loaded from"
    with pytest.raises(ValueError, match=words):
        target.generate(**padded_batch(1), ssd_config=hf_ssd.SSDConfig(drafter="mtp"))
