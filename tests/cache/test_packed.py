"""Packed weights: the same products to rounding, only where nothing else happens in a layer, and never in the model."""

import contextlib
import gc
import operator
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import hf_ssd
from hf_ssd import devices
from hf_ssd.cache import packed, packed_linear
from hf_ssd.cache.attached import attached_to
from hf_ssd.cache.cached_model import CachedModel
from hf_ssd.cache.packed import packed_forwards
from hf_ssd.cache.ragged import RaggedCache
from hf_ssd.cache.trial import check_supported

from ..helpers.comparing import generate
from ..helpers.families import sharp_model, tiny_config
from ..helpers.heads import tiny_head
from ..helpers.packing import DTYPES, PACKS, count_calls, times
from ..helpers.tiny import VOCAB, padded_batch, speculated, tiny_draft, tiny_model

EXACT = {"atol": 1e-4, "rtol": 1e-4}
LAYERS = 3 * 7 + 1  # of a tiny model
TOKENS = torch.arange(2, 14)[None]
QUICK, ALL = "not slow", "slow or not slow"
SUITES = {  # and the tests of each; all of the families or of the calls against plain generation take half an hour
    "conformance/test_greedy.py": ALL,
    "conformance/test_sampled.py": ALL,
    "conformance/test_families.py": QUICK,
    "conformance/test_against_plain.py": QUICK,
    "conformance/test_hybrids.py": QUICK,
    "generation/test_one_model_for_all.py": QUICK,
    "test_matrix.py::test_greedy_tokens_are_those_of_plain_generate": QUICK,
}


@pytest.fixture
def products(monkeypatch):
    """The number of tokens of each call of a module with packed weights."""
    return count_calls(monkeypatch, *packed.KINDS)


@torch.no_grad()
def logits(model, pack_weights):
    """Of a pass over the tokens."""
    return CachedModel(model, RaggedCache(), pack_weights=pack_weights).extend(TOKENS, [0])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40,), (1, 40), (2, 3, 40), (0, 40), (2, 1, 33, 40)], ids=str)
@torch.no_grad()
def test_a_product_with_a_packed_weight_is_that_of_the_layer(shape, dtype, bias):
    layer = nn.Linear(40, 56, bias).to(dtype)
    model = SimpleNamespace(modules=lambda: [layer], device=torch.device("cpu"), _compiled_call_impl=None)
    states, forward = torch.randn(shape).to(dtype), packed_forwards(model, True)[layer]
    ours, theirs = forward(states), layer(states)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, **(EXACT if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}))
    every_second = torch.randn(*shape[:-1], 80).to(dtype)[..., ::2]
    torch.testing.assert_close(forward(every_second), layer(every_second), atol=2e-2, rtol=2e-2)


def test_with_gradients_or_autocast_the_layer_computes_itself():
    model = tiny_model()
    layer = model.lm_head
    forward = packed_forwards(model, True)[layer]
    forward.packed = None  # is not read
    states = torch.randn(2, 32, requires_grad=True)
    forward(states).sum().backward()
    assert states.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert forward(states).dtype == torch.bfloat16


class OwnLinear(nn.Linear):
    pass


class Quantized(torch.Tensor):
    pass


def with_a_forward(layer):
    forward = layer.forward
    layer.forward = lambda states: forward(states) * 2


def with_weight(layer, weight):
    layer.weight = nn.Parameter(weight, requires_grad=False)


def without_versions(layer):
    with torch.inference_mode():
        with_weight(layer, torch.randn(VOCAB, 32))


NOT_PACKED = {
    "another type": lambda layer: setattr(layer, "__class__", OwnLinear),
    "another dtype": lambda layer: layer.to(torch.float64),
    "a hook": lambda layer: layer.register_forward_hook(lambda module, inputs, output: output * 2),
    "a hook before": lambda layer: layer.register_forward_pre_hook(lambda module, inputs: inputs),
    "a parametrization": lambda layer: parametrize.register_parametrization(layer, "weight", nn.Identity()),
    "a forward": with_a_forward,
    "another kind of weight": lambda layer: with_weight(layer, layer.weight.detach().as_subclass(Quantized)),
    "no versions": without_versions,
    "another device": lambda layer: layer.to("meta"),
    "compiled alone": lambda layer: layer.compile(backend="eager"),
}


@pytest.mark.parametrize("change", NOT_PACKED)
def test_a_layer_that_is_more_than_a_product_is_not_packed(change):
    model = tiny_model()
    assert len(packed_forwards(model, True)) == LAYERS
    NOT_PACKED[change](model.lm_head)
    found = packed_forwards(model, True)
    assert len(found) == LAYERS - 1 and model.lm_head not in found


def test_nothing_is_packed_for_a_compiled_model_or_with_hooks_of_all_modules():
    model = tiny_model()
    with nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None):
        assert not packed_forwards(model, True)
    assert packed_forwards(model, True) and not packed_forwards(model, False)
    model.compile(backend="eager")
    assert not packed_forwards(model, True)


@pytest.mark.parametrize("setting", ["older", "backends.mkldnn.matmul", "backends.mkldnn", "backends"])
def test_the_precision_that_the_user_has_set_counts(setting):
    model = tiny_model()
    try:
        if setting == "older":
            torch.set_float32_matmul_precision("medium")
        else:
            operator.attrgetter(setting)(torch).fp32_precision = "bf16"
        assert not packed_forwards(model, True)
    finally:
        torch.set_float32_matmul_precision("highest")
        for place in (torch.backends.mkldnn.matmul, torch.backends.mkldnn, torch.backends):
            place.fp32_precision = "none"
    assert packed_forwards(model, True)


def fails(*arguments):
    raise RuntimeError("could not create a primitive")


@pytest.mark.parametrize("missing", ["_reorder_linear_weight", "_linear_pointwise"])
@pytest.mark.parametrize("raises", [False, True])
def test_without_the_operations_nothing_happens_and_nothing_is_said(missing, raises, monkeypatch):
    operations = {name: getattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")}
    del operations[missing]
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**operations, **({missing: fails} if raises else {})))
    monkeypatch.setattr(packed_linear, "_verdicts", {})
    monkeypatch.setattr(packed.logger, "warning_once", lambda text: pytest.fail(text))
    assert not packed_forwards(tiny_model(), True) and not packed_forwards(tiny_model(), "auto")


CHANGES = {
    "in place": lambda layer: layer.weight.mul_(-1),
    "through data": lambda layer: layer.weight.data.mul_(-1),
    "by another parameter": lambda layer: setattr(layer, "weight", nn.Parameter(-layer.weight.detach())),
    "by a state": lambda layer: layer.load_state_dict({"weight": -layer.weight.detach()}),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_weight_that_changed_is_packed_anew(change):
    model = tiny_model()
    before = logits(model, True)
    CHANGES[change](model.lm_head)
    torch.testing.assert_close(logits(model, True), -before, **EXACT)


def test_a_packed_weight_that_is_stale_is_noticed(monkeypatch):
    """The mutants: neither addresses and versions nor values are looked at, or no values."""
    values_of = packed.values_of
    monkeypatch.setattr(packed, "values_of", lambda weights: values_of(weights)[0])
    with pytest.raises(AssertionError):
        test_a_weight_that_changed_is_packed_anew("through data")
    monkeypatch.setattr(packed, "values_of", lambda weights: ())
    with pytest.raises(AssertionError):
        test_a_weight_that_changed_is_packed_anew("in place")


def test_unchanged_weights_are_packed_once_and_go_with_their_model():
    gc.collect()
    model = tiny_model()
    first, second = (packed_forwards(model, True) for _ in range(2))
    assert all(first[layer] is second[layer] for layer in first)
    count = len(packed._packed)
    del model, first, second
    gc.collect()
    assert len(packed._packed) == count - LAYERS


def shifted(layer, inputs, output):
    return output + output.mean(dim=1, keepdim=True)


def test_a_model_that_is_refused_keeps_no_packed_weights():
    model = tiny_model()
    model.model.layers[1].register_forward_hook(shifted)
    with pytest.raises(ValueError, match="remove it, or generate without"):
        check_supported(model, pack_weights=True)
    assert not any(module in packed._packed for module in model.modules())


def test_the_layer_in_an_adapter_and_a_head_that_shares_the_embedding_are_packed(products):
    model = tiny_model(tie_word_embeddings=True)

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer = base

        def forward(self, states):
            return self.base_layer(states) + states.sum()

    model.model.layers[0].mlp.up_proj = Adapter(model.model.layers[0].mlp.up_proj)
    assert len(packed_forwards(model, True)) == LAYERS
    with torch.no_grad():
        torch.testing.assert_close(logits(model, True), model(TOKENS).logits, **EXACT)
    assert len(products) == 3 * LAYERS  # of the pass, and of two passes before it that try grouped heads


# ---------------------------------------------------------------- what "auto" chooses


def test_auto_packs_layers_and_uses_packed_weights_where_they_are_faster(monkeypatch):
    model = tiny_model()
    times(monkeypatch, [0.96, 0.93, 1.0])
    found = packed_forwards(model, "auto")
    assert len(found) == LAYERS
    ours, linear = [], packed_linear.linear
    monkeypatch.setattr(packed_linear, "linear", lambda states, *of: ours.append(len(states)) or linear(states, *of))
    with torch.no_grad():
        for tokens in (1, 2, 5, 15, 16, 64):
            found[model.lm_head](torch.randn(tokens, 32))
    assert ours == [1, 16, 64]
    times(monkeypatch, [1.0, 1.0, 0.99])
    assert not packed_forwards(tiny_model(seed=1), "auto")
    assert len(packed_forwards(tiny_model(seed=1), True)) == LAYERS


def test_auto_times_each_kind_of_layer_once_and_no_small_ones(monkeypatch):
    tried, trial = [], packed_linear._try
    monkeypatch.setattr(packed_linear, "_try", lambda ones, bias: tried.append(ones[0].shape) or trial(ones, bias))
    monkeypatch.setattr(packed_linear, "_verdicts", {})
    assert not packed_forwards(tiny_model(), "auto") and not tried
    monkeypatch.setattr(packed, "LEAST", 0)
    packed_forwards(tiny_model(), "auto")
    packed_forwards(tiny_model(seed=1), "auto")
    assert len(tried) == len(set(tried)) == 5


@pytest.mark.parametrize("rows", [(1,), (1, 1), (2, 1), (2, 2), (5,), (1, 9), (0,)])
def test_few_tokens_are_padded_where_more_take_less_time(monkeypatch, rows):
    model = tiny_model()
    times(monkeypatch, [1.0, 0.5, 0.5])
    layer = model.model.layers[0].mlp.up_proj
    forward = packed_forwards(model, "auto")[layer]
    states, sizes, call = torch.randn(*rows, layer.in_features), [], packed_linear._product
    monkeypatch.setattr(packed_linear, "_product", lambda states, *of: sizes.append(len(states)) or call(states, *of))
    with torch.no_grad():
        found, tokens = forward(states), states[..., 0].numel()
        torch.testing.assert_close(found, layer(states), **EXACT)
    assert found.shape == (*rows, layer.out_features)
    assert sizes == ([5] if 0 < tokens < 5 else sizes)


GROUPS = {
    "version 1": ("4:memory:/a/b\n1:cpu:/", "memory/a", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    "version 2": ("0::/a/b", "a", "memory.max", "memory.current", ""),
}


@pytest.mark.parametrize("version", GROUPS)
@pytest.mark.parametrize("smaller", ["machine", "group", "neither"])
def test_a_model_that_was_passed_is_packed_where_memory_holds_the_copy_twice(smaller, version, tmp_path, monkeypatch):
    model, said = tiny_model(), []
    size = sum(layer.weight.nbytes for layer in model.modules() if type(layer) is nn.Linear)
    names, folder, limit, used, kind = GROUPS[version]
    group = tmp_path / "groups" / folder
    group.mkdir(parents=True)
    (group / limit).write_text(f"{10**6 + (2 * size - 1 if smaller == 'group' else 2 * size)}\n")
    (group / used).write_text(f"{10**6 + 500}\n")
    (group / "memory.stat").write_text(f"anon 7\n{kind}inactive_file 500\n")
    if version == "version 2":
        (group.parent / "memory.max").write_text("max\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(names)
    kilobytes = 2 * size // 1024 + (-1 if smaller == "machine" else 1)
    (tmp_path / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {kilobytes} kB\n")
    monkeypatch.setattr(devices, "PROCESSES", tmp_path)
    monkeypatch.setattr(devices, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(packed.logger, "warning_once", said.append)
    times(monkeypatch, [0.5, 0.5, 0.5])
    assert bool(packed_forwards(model, "auto")) == (smaller == "neither")
    assert len(said) == (smaller != "neither") and all("SSDConfig(pack_weights=True)" in text for text in said)
    assert len(packed_forwards(model, True)) == LAYERS


OWN = {  # models, and how many of their modules keep packed weights alone
    "layers": (tiny_model, LAYERS),
    "a shared embedding": (lambda: tiny_model(tie_word_embeddings=True), LAYERS - 1),
    "experts": (lambda: sharp_model(tiny_config("qwen3_moe")), 2 * 5 + 1),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_model_of_its_own_keeps_no_second_copy(kind, products):
    model, count = OWN[kind][0](), OWN[kind][1]
    model.tower = nn.Linear(32, 32)  # which texts do not use
    expected, plain = logits(model, False), model.generate(TOKENS, max_new_tokens=12, do_sample=False)
    shapes = [weight.shape for weight in model.parameters()]
    packed.own(model)
    for pack_weights in (True, True, False):  # weights that were given up stay packed
        torch.testing.assert_close(logits(model, pack_weights), expected, **EXACT)
    alone = [module for module, forward in packed_forwards(model, False).items() if forward.is_alone]
    assert len(alone) == count and len(products) >= 3 * count
    assert all(weight.untyped_storage().nbytes() == 4 for module in alone for weight in module.parameters())
    assert [weight.shape for weight in model.parameters()] == shapes and model.tower.weight.isfinite().all()
    assert not attached_to(model).has_own_forward
    products.clear()
    torch.testing.assert_close(model(TOKENS).logits, expected, **EXACT)  # by passes that are not ours
    assert torch.equal(model.generate(TOKENS, max_new_tokens=12, do_sample=False), plain)
    assert len(products) >= 13 * len(alone)
    for layer in alone if kind != "experts" else ():
        assert layer(torch.zeros(2, 0, layer.in_features)).shape == (2, 0, layer.out_features)


@pytest.mark.parametrize("is_interrupted", [False, True])
@torch.no_grad()
def test_a_model_that_reads_a_weight_by_itself_or_is_interrupted_keeps_its_weights(is_interrupted, monkeypatch):
    def interrupted(found, expected):
        raise KeyboardInterrupt

    model = tiny_model()
    layer = model.model.layers[1].mlp
    if is_interrupted:
        packed_forwards(tiny_model(), True)  # tries its layers
        monkeypatch.setattr(packed, "are_close", interrupted)
    else:
        forward = type(layer).forward
        layer.forward = lambda states: forward(layer, states) + layer.up_proj.weight.sum()
    packed.own(model)
    with pytest.raises(KeyboardInterrupt) if is_interrupted else contextlib.nullcontext():
        assert len(packed_forwards(model, True)) == LAYERS
    assert model(TOKENS).logits.isfinite().all()


# ---------------------------------------------------------------- whole calls


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_passes_of_a_call_run_packed_and_the_model_does_not_change(asynchronous, do_sample, assistant, products):
    target, draft = hf_ssd.enable(tiny_model()), tiny_draft()
    parts = [*target.modules(), *draft.modules()]
    before, state = [dict(vars(part)) for part in parts], {name: id(one) for name, one in target.named_parameters()}
    outputs, drafts = [], assistant if asynchronous else draft
    for pack_weights in (False, True):
        torch.manual_seed(3)
        of_config = {"lookahead": 3, "pack_weights": pack_weights}
        output = generate(target, drafts, padded_batch(3), of_config, max_new_tokens=24, do_sample=do_sample)
        assert output.ssd_stats.tokens_per_round > 1.2
        outputs.append(output.sequences)
        assert bool(products) == pack_weights
    assert torch.equal(*outputs)
    assert {27, 12} <= set(products)  # the prefill, and verifications of three rows
    assert [dict(vars(part)) for part in parts] == before
    assert state == {name: id(one) for name, one in target.named_parameters()}


def test_a_head_that_reads_hidden_states_runs_packed(products):
    target = hf_ssd.enable(tiny_model())
    head = tiny_head(target)
    forwards = packed_forwards(head, True)
    speculated(target, head, padded_batch(1), {"pack_weights": True}, least=0, max_new_tokens=12)
    assert head.fc in forwards and head.lm_head in forwards and len(products) > 24 * LAYERS / 4


@pytest.mark.slow
def test_a_worker_that_loaded_its_draft_keeps_packed_weights_alone(tmp_path):
    target = hf_ssd.enable(tiny_model())
    tiny_draft().save_pretrained(tmp_path)
    with hf_ssd.launch_draft(tmp_path, num_threads=1) as assistant:
        for pack_weights in (True, False):  # weights that were given up stay packed
            settings = {"pack_weights": pack_weights, "asynchronous": True}
            speculated(target, assistant, padded_batch(3), settings, least=1.2, max_new_tokens=24)


@pytest.mark.slow
@pytest.mark.skipif(PACKS, reason="these suites run packed")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("suite", SUITES)
def test_suites_hold_with_packed_weights(suite):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", f"tests/{suite}", "-m", SUITES[suite]]
    options = {"capture_output": True, "text": True, "timeout": 850}
    done = subprocess.run(command, env={**os.environ, "HF_SSD_PACK_WEIGHTS": "1"}, **options)
    assert done.returncode == 0, done.stdout[-2000:]
