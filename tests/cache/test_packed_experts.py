"""Packed experts: the results of transformers' own functions to rounding, anew after changes, and whole calls."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import hf_ssd
from hf_ssd.cache import packed, packed_linear
from hf_ssd.cache.packed import packed_forwards
from hf_ssd.cache.packed_experts import PackedExperts

from ..helpers.families import EXPERTS, sharp_model, tiny_config
from ..helpers.packing import DTYPES, count_calls, times
from ..helpers.tiny import padded_batch, speculated

WIDTH, INNER = 40, 24
EXACT, ROUGH = {"atol": 1e-4, "rtol": 1e-4}, {"atol": 2e-2, "rtol": 2e-2}
KINDS = {
    "gate": lambda: Qwen3MoeExperts(
        Qwen3MoeConfig(hidden_size=WIDTH, moe_intermediate_size=INNER, num_experts=EXPERTS)
    ),
    "no gate": lambda: NemotronHExperts(
        NemotronHConfig(hidden_size=WIDTH, moe_intermediate_size=INNER, n_routed_experts=EXPERTS)
    ),
    "bias, transposed": lambda: GptOssExperts(
        GptOssConfig(hidden_size=WIDTH, intermediate_size=INNER, num_local_experts=EXPERTS)
    ),
}


def experts_of(kind, dtype=torch.float32):
    torch.manual_seed(0)
    experts = KINDS[kind]()
    for weight in experts.parameters():
        nn.init.normal_(weight, std=0.1)
    experts.config._experts_implementation = "grouped_mm"
    return experts.to(dtype)


def packed_forward(experts, pack_weights=True):
    model = SimpleNamespace(modules=lambda: [experts], device=torch.device("cpu"), _compiled_call_impl=None)
    return packed_forwards(model, pack_weights).get(experts)


def routed(tokens, dtype=torch.float32, chosen=2):
    choices = torch.rand(tokens, EXPERTS).topk(chosen).indices
    return torch.randn(tokens, WIDTH).to(dtype), choices, torch.rand(tokens, chosen)


@torch.no_grad()
def check(experts, forward, inputs):
    tolerance = EXACT if inputs[0].dtype == torch.float32 else ROUGH
    ours = forward(*inputs)
    for name in ("grouped_mm", "batched_mm", "eager")[: 3 if inputs[0].dtype == torch.float32 else 2]:
        experts.config._experts_implementation = name
        theirs = experts(*inputs)
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_experts_give_what_transformers_functions_give(kind, dtype, tokens):
    experts = experts_of(kind, dtype)
    check(experts, packed_forward(experts), routed(tokens, dtype))


def test_a_norm_after_each_expert_is_computed():
    experts = experts_of("gate")
    experts.has_post_expert_norm, experts.post_expert_norm = True, nn.RMSNorm(WIDTH)
    forward, inputs = packed_forward(experts), routed(5)
    each = torch.zeros(5, WIDTH)
    with torch.no_grad():
        for place in range(2):  # the results of one expert, before the weights of the routing
            one = inputs[1][:, place : place + 1]
            experts.has_post_expert_norm = False
            alone = experts(inputs[0], one, torch.ones(5, 1))
            each += nn.functional.rms_norm(alone, (WIDTH,)) * inputs[2][:, place : place + 1]
        experts.has_post_expert_norm = True
        torch.testing.assert_close(forward(*inputs), each, **EXACT)


def test_a_number_beyond_the_experts_stands_for_none():
    """As in transformers' expert parallelism, where other processes have the other experts."""
    experts = experts_of("gate")
    experts._is_expert_parallel = True
    states, chosen, weights = routed(5)
    chosen[1], chosen[3, 0] = EXPERTS, EXPERTS
    inputs, forward = (states, chosen, weights.masked_fill(chosen == EXPERTS, 0.0)), packed_forward(experts)
    with torch.no_grad():
        torch.testing.assert_close(forward(*inputs), experts(*inputs), **EXACT)
        assert not forward(*inputs)[1].any()


@pytest.mark.parametrize("mutant", ["another expert", "another token"])
def test_another_expert_or_token_is_noticed(mutant, monkeypatch):
    experts, inputs = experts_of("gate"), routed(5)
    forward = packed_forward(experts)
    if mutant == "another expert":
        forward.packed[1].append(forward.packed[1].pop(0))
    else:
        sort = torch.Tensor.argsort
        monkeypatch.setattr(torch.Tensor, "argsort", lambda self, **of: sort(self, **of) if of else sort(sort(self)))
    with pytest.raises(AssertionError):
        check(experts, forward, inputs)


def test_with_gradients_or_autocast_the_experts_compute_themselves():
    experts, inputs = experts_of("gate"), routed(5)
    forward = packed_forward(experts)
    forward.packed = None  # is not read
    inputs[0].requires_grad_()
    forward(*inputs).sum().backward()
    assert inputs[0].grad is not None and experts.down_proj.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert forward(*inputs).shape == (5, WIDTH)


class Own(Qwen3MoeExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return 2 * super().forward(hidden_states, top_k_index, top_k_weights)


def with_a_function(experts):
    ALL_EXPERTS_FUNCTIONS.register("of the user", lambda self, states, *_: states)
    experts.config._experts_implementation = "of the user"


NOT_PACKED = {  # others are in `test_packed.py`
    "a forward of its own class": lambda experts: setattr(experts, "__class__", Own),
    "a function of the user": with_a_function,
    "a part on another device": lambda experts: setattr(
        experts, "down_proj", nn.Parameter(experts.down_proj.to("meta"))
    ),
    "other strides": lambda experts: setattr(experts, "down_proj", nn.Parameter(experts.down_proj.mT.contiguous().mT)),
    "weights of another kind": lambda experts: setattr(experts, "_parameters", {}),
}


@pytest.mark.parametrize("change", NOT_PACKED)
def test_experts_that_compute_something_else_are_not_packed(change):
    experts = experts_of("gate")
    assert isinstance(packed_forward(experts), PackedExperts)
    NOT_PACKED[change](experts)
    assert packed_forward(experts) is None


@torch.no_grad()
def check_packed_anew():
    experts = experts_of("gate")
    before, inputs = packed_forward(experts), routed(5)
    experts.down_proj.data[1].mul_(-1)
    after = packed_forward(experts)
    assert after is not before and packed_forward(experts) is after
    check(experts, after, inputs)


def test_experts_of_which_one_has_changed_are_packed_anew(monkeypatch):
    """Other changes are in `test_packed.py`."""
    check_packed_anew()
    values_of = packed.values_of
    monkeypatch.setattr(packed, "values_of", lambda weights: values_of([weights[0][0]]))  # the mutant: of the first one
    with pytest.raises(AssertionError):
        check_packed_anew()


# ---------------------------------------------------------------- what "auto" chooses


def test_auto_packs_experts_where_it_is_faster_for_one_of_their_weights(monkeypatch):
    times(monkeypatch, [0.96, 0.93, 0.5] + [1.0, 1.0, 1.0])
    forward = packed_forward(experts_of("gate"), "auto")
    assert [{one.is_faster for one in ones} for ones in forward.packed] == [{(False, True, True)}, {(False,) * 3}]
    experts = experts_of("gate")
    check(experts, packed_forward(experts, "auto"), routed(40))
    times(monkeypatch, [1.0])
    assert packed_forward(experts_of("gate"), "auto") is None and packed_forward(experts_of("gate")) is not None


def test_all_experts_are_tried_together_so_that_they_come_from_memory(monkeypatch):
    times(monkeypatch, [0.5])
    timed, counts = packed_linear._timed, []
    monkeypatch.setattr(packed_linear, "_timed", lambda *of: counts.append(len(of[2])) or timed(*of))
    assert packed_forward(experts_of("gate"), "auto") is not None and {*counts} == {EXPERTS}
    monkeypatch.setattr(packed_linear, "MOST", 2 * 2 * INNER * WIDTH)  # values of two experts
    monkeypatch.setattr(packed_linear, "_verdicts", {})
    counts.clear()
    assert packed_forward(experts_of("gate"), "auto") is not None and {*counts} == {2, 4}


# ---------------------------------------------------------------- whole models


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_calls_with_packed_experts_give_the_tokens_of_plain_generate(family, monkeypatch):
    """A model that keeps packed experts alone is in `test_packed.py`."""
    config, passes = tiny_config(family), count_calls(monkeypatch, PackedExperts)
    target, draft = hf_ssd.enable(sharp_model(config)), sharp_model(config, noise=0.02)
    speculated(target, draft, padded_batch(3), {"pack_weights": True}, least=1.05, max_new_tokens=24)
    assert {27, 12} <= set(passes)  # the prefill, and verifications of three rows
    passes.clear()
    speculated(target, draft, padded_batch(3), {"pack_weights": False}, least=1.05, max_new_tokens=24)
    assert not passes
