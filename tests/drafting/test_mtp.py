"""Multi-token prediction: the layer comes from the target's own checkpoint, and drafts as transformers' loop does."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import hf_ssd
from hf_ssd.drafting.head_drafter import HeadDrafter
from hf_ssd.drafting.heads import mtp
from hf_ssd.drafting.heads.loading import mtp_head_of
from hf_ssd.rounds import IN_TURN

from ..helpers.tiny import padded_batch

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
SIZES |= {"eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False}
EXPERTS = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
LATENT = {"num_key_value_heads": 4, "head_dim": None, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 8, "qk_nope_head_dim": 8}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}
NEXT = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
FAMILIES = {
    "deepseek_v3": {**EXPERTS, **LATENT},
    "glm4_moe": EXPERTS,
    "qwen3_5_text": LINEAR,
    "qwen3_next": {**LINEAR, **NEXT},
}
OPTIONS = {"max_new_tokens": 24, "return_dict_in_generate": True}


def name_in_checkpoint(name: str, is_qwen: bool) -> str:
    """Returns the published name of a weight of transformers' MTP layer."""
    if not is_qwen:
        name = name.replace("layers.0.", f"model.layers.{SIZES['num_hidden_layers']}.").replace("mtp_block.", "")
        return name.replace("post_norm.", "shared_head.norm.")
    for theirs, ours in mtp.QWEN.items():
        if name.startswith(ours):
            return theirs.strip("^").replace("\\", "") + name.removeprefix(ours)


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
    config = AutoConfig.for_model("mellum", **SIZES, **few, num_mtp_layers=1, layer_types=kinds)
    target = AutoModelForCausalLM.from_config(config).eval()
    theirs = MtpModel(target, 1).eval()
    for parameter in theirs.layers.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    head = mtp.MtpHead(theirs, target)
    assert head.config.layer_types == ["sliding_attention"]
    tokens, count = torch.arange(12)[None], 12
    inputs = head.inputs(tokens, torch.randn(1, count, SIZES["hidden_size"]))
    place = torch.arange(count)
    distance = place[:, None] - place
    with torch.no_grad():
        full, windowed = (
            head(inputs, attention_mask=torch.where((distance >= 0) & (distance < window), 0.0, -torch.inf)[None, None])
            for window in (count, 4)
        )
        first = head(inputs).last_hidden_state
    assert torch.allclose(first, windowed.last_hidden_state, atol=1e-5) and not torch.allclose(
        first, full.last_hidden_state, atol=1e-3
    )


@pytest.fixture(
    scope="module",
    params=["qwen3_5_text", *(pytest.param(kind, marks=pytest.mark.slow) for kind in FAMILIES if "3_5" not in kind)],
)
def published(request, tmp_path_factory):
    """A target that was loaded from a checkpoint with an MTP layer, and transformers' model of that layer."""
    torch.manual_seed(0)
    kind, folder = request.param, tmp_path_factory.mktemp("published")
    original = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **FAMILIES[kind]}))
    text, is_qwen = original.config, kind in mtp.QWEN_TYPES
    shadow = copy.copy(original)
    if is_qwen:
        shadow.config = copy.deepcopy(text)
        shadow.config.num_mtp_layers, shadow.config.mtp_layer_types = 1, ["full_attention"]
    theirs = MtpModel(shadow, 1).eval()
    for parameter in theirs.layers.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    original.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    for name, tensor in theirs.layers.state_dict(prefix="layers.").items():
        for own, of_expert in per_expert(name, tensor).items():
            state[name_in_checkpoint(own, is_qwen)] = of_expert
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        if not is_qwen:  # transformers names the layers of the published sizes
            patch.setattr(type(original), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\."])
        target = AutoModelForCausalLM.from_pretrained(folder).eval()
        mtp_head_of(target)
    return hf_ssd.enable(target), theirs


def drafted_by_transformers(target, theirs, text: torch.LongTensor) -> int:
    """Returns the token that transformers' MTP model drafts after a text."""
    with torch.no_grad():
        hidden = target(text[None, :-1], output_hidden_states=True).hidden_states[-1]
        positions = torch.arange(1, len(text))[None]
        cache = MtpCache(config=theirs.config)
        tokens, _, _ = theirs(text[None, 1:], hidden, None, positions, cache)
    return int(tokens[0, 0])


def agreement(target, theirs, monkeypatch) -> list[bool]:
    """Decodes with the MTP layer, and returns for some rounds and rows whether transformers drafts the same token."""
    drafted, complete = [], HeadDrafter.complete

    def spy(self, ready, width, plan):
        lengths = list(self.prefix.lengths)
        speculation, steps = complete(self, ready, width, plan)
        drafted.append((lengths, speculation.tokens))
        return speculation, steps

    monkeypatch.setattr(HeadDrafter, "complete", spy)
    inputs = padded_batch(3)
    plain = target.generate(**inputs, **OPTIONS, do_sample=False, ssd_config=None).sequences
    config = hf_ssd.SSDConfig(drafter="mtp", lookahead=3)
    output = target.generate(**inputs, **OPTIONS, do_sample=False, ssd_config=config)
    assert torch.equal(output.sequences, plain)
    records = output.ssd_stats.records
    assert records and all(record.mode == IN_TURN for record in records)
    texts = [row[mask.bool()] for row, mask in zip(inputs["input_ids"], inputs["attention_mask"])]
    texts = [torch.cat([text, row[inputs["input_ids"].shape[1] :]]) for text, row in zip(texts, plain)]
    return [
        of_row[0] == drafted_by_transformers(target, theirs, text[:length])
        for lengths, tokens in drafted[::3]
        for text, length, of_row in zip(texts, lengths, tokens)
        if of_row and length <= len(text) and 1 not in text[:length]
    ]


def test_the_layer_of_the_checkpoint_drafts_as_transformers_does(published, monkeypatch):
    agrees = agreement(*published, monkeypatch)
    assert len(agrees) > 5 and all(agrees)


def test_states_of_another_layer_are_noticed(published, monkeypatch):
    """The mutant: the head reads the states after the first layer."""
    target, theirs = published
    monkeypatch.setattr(mtp_head_of(target).config, "target_layers", [1])
    assert not all(agreement(target, theirs, monkeypatch))


def test_a_seed_repeats_a_sampled_call(published):
    target, _ = published
    config = hf_ssd.SSDConfig(drafter="mtp", lookahead=3)
    outputs = []
    for _ in range(2):
        torch.manual_seed(4)
        outputs.append(target.generate(**padded_batch(3), **OPTIONS, do_sample=True, ssd_config=config))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert all(record.mode == IN_TURN for record in outputs[0].ssd_stats.records)


def test_a_target_without_the_layer_is_refused_in_one_sentence(target):
    with pytest.raises(ValueError, match="has no layer for multi-token prediction"):
        target.generate(**padded_batch(1), ssd_config=hf_ssd.SSDConfig(drafter="mtp"))


def test_a_checkpoint_without_the_layer_is_refused_in_one_sentence(tmp_path):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **SIZES, **EXPERTS))
    model.save_pretrained(tmp_path)
    target = hf_ssd.enable(AutoModelForCausalLM.from_pretrained(tmp_path))
    with pytest.raises(ValueError, match="cannot be loaded from"):
        target.generate(**padded_batch(1), ssd_config=hf_ssd.SSDConfig(drafter="mtp"))
