"""The draft's weights are shared with its worker: they stay as the user left them, and the draft works with them."""

import contextlib
import gc
import json
import os
import threading
import weakref

import pytest
import torch
from accelerate import disk_offload
from transformers.utils import logging

import hf_ssd
from hf_ssd.distributed import draft_server
from hf_ssd.distributed.draft_server import DraftServer
from hf_ssd.distributed.launch import assistant_for
from hf_ssd.distributed.weights import SharedWeights, copy_shared_weights, model_from_shared_weights
from hf_ssd.rounds import AHEAD, IN_TURN

from ..helpers import calls
from ..helpers.processes import children
from ..helpers.tiny import FAMILIES, VOCAB, ready, tiny_draft, tiny_model

FIXED = {"fan_out": "uniform"}
CONFIG = hf_ssd.SSDConfig(lookahead=3, budget=8, **FIXED)


def call(target, draft, length=8, new_tokens=12, settings=FIXED):
    """Returns the stats of a call whose tokens are plain generation's."""
    inputs = {"input_ids": torch.arange(length)[None] % 90 + 3}
    stats = calls.call(target, draft, inputs=inputs, settings=settings, max_new_tokens=new_tokens).ssd_stats
    assert stats.draft_failure is None
    return stats


def modes(stats):
    return {record.mode for record in stats.records}


@pytest.fixture
def logged(caplog):
    logging.enable_propagation()
    yield caplog
    logging.disable_propagation()


# ---------------------------------------------------------------- the copy that processes share


@pytest.mark.parametrize("family, tied", [("llama", False), ("llama", True), ("gemma", False)])
def test_a_model_is_rebuilt_over_the_same_memory_which_has_no_name(family, tied):
    model, kind, names = tiny_model(family, tie_word_embeddings=tied), FAMILIES[family][0], set(os.listdir("/dev/shm"))
    model.register_buffer("empty", torch.empty(0))  # not to be taken for the next one
    tokens = torch.randint(2, VOCAB, (1, 8))
    with torch.inference_mode():
        expected = model(tokens).logits
    weights = SharedWeights(hf_ssd.enable(model))
    assert weights.fill() == 0 == weights.fill() and set(os.listdir("/dev/shm")) == names
    other = model_from_shared_weights(json.loads(json.dumps(weights.description)))
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits, expected)
        assert torch.equal(other(tokens).logits, expected)
    assert type(other) is kind and not other.empty.numel()
    assert (other.lm_head.weight is other.get_input_embeddings().weight) == tied
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    assert weights.fill() == 1
    for ours, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(ours, theirs)
    weights.close()


def test_the_first_call_does_not_copy_the_weights_of_its_draft(target, monkeypatch):
    """The thread that starts the worker does. A later call copies them only where they have changed."""
    threads, fill, draft = [], SharedWeights.fill, tiny_draft()

    def noted(self):
        before, version = self.version, fill(self)
        threads.extend([threading.current_thread()] * (version > before))
        return version

    monkeypatch.setattr(SharedWeights, "fill", noted)
    for _ in range(2):
        call(target, draft, new_tokens=4)
        ready(assistant_for(draft))
    assert len(threads) == 1 and threads[0] is not threading.main_thread()
    with torch.no_grad():
        draft.lm_head.weight.mul_(2)
    call(target, draft, new_tokens=4)
    assert threads[1:] == [threading.main_thread()]


# ---------------------------------------------------------------- nothing of the user's is written


def snapshot(model):
    return {name: (tensor.dtype, tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}


def assert_untouched(model, before):
    for name, tensor in model.state_dict().items():
        dtype, address, values = before[name]
        assert tensor.dtype == dtype and tensor.data_ptr() == address and torch.equal(tensor, values), name


def change_shared_modules(target, draft):
    target.load_state_dict(tiny_model(seed=7).state_dict())


CHANGES = {
    "fill": lambda target, draft: draft.model.layers[1].mlp.up_proj.weight.detach().fill_(0.5),
    "halve": lambda target, draft: draft.to(torch.bfloat16),  # so that there is a new worker
    "modules that draft and target share": change_shared_modules,
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_after_the_worker_copied_them_stay_changed(change):
    target, draft = hf_ssd.enable(tiny_model()), tiny_draft()
    if CHANGES[change] is change_shared_modules:
        draft.model.embed_tokens, draft.lm_head = target.model.embed_tokens, target.lm_head
    call(target, draft, new_tokens=2)  # which starts the worker
    assistant_for(draft).workers[0].thread.join(60)
    CHANGES[change](target, draft)
    before = [snapshot(model) for model in (target, draft)]
    ready(assistant_for(draft))
    assert modes(call(target, draft)) == {AHEAD}
    for model, of_model in zip((target, draft), before):
        assert_untouched(model, of_model)


def test_a_draft_that_is_given_up_after_its_worker_was_started_leaves_memory():
    draft = tiny_draft()
    with hf_ssd.launch_draft(draft, num_threads=1):
        gone = weakref.ref(draft)
        del draft
        gc.collect()
        assert gone() is None


# ---------------------------------------------------------------- a running worker has the weights as they are


def assign(draft, state):
    draft.load_state_dict(state, assign=True)


def set_data(draft, state):
    for name, parameter in draft.named_parameters():
        parameter.data = state[name].clone()


def write_through_data(draft, state):
    for name, parameter in draft.named_parameters():
        parameter.data.copy_(state[name])


def load(draft, state):
    draft.load_state_dict(state)


@pytest.mark.parametrize(
    "change, length, mode",
    [
        (assign, 8, contextlib.nullcontext),
        (set_data, 8, contextlib.nullcontext),
        (write_through_data, 8, contextlib.nullcontext),
        (load, 100, contextlib.nullcontext),  # the next text goes on from this one, whose cache the worker has kept
        (load, 8, torch.inference_mode),  # whose tensors have no version
    ],
)
def test_a_running_worker_drafts_with_new_weights(target, change, length, mode):
    with mode():
        draft = tiny_model(seed=5).requires_grad_(mode is contextlib.nullcontext)
    with hf_ssd.launch_draft(draft, num_threads=1) as assistant:
        with mode():
            assert call(target, assistant, length).acceptance_rate < 0.3
            change(draft, {name: tensor.clone() for name, tensor in target.state_dict().items()})
        stats = call(target, assistant, length + 10, new_tokens=30)
        assert modes(stats) == {AHEAD} and stats.acceptance_rate == 1 and assistant.restarts == 0


def test_a_draft_of_another_dtype_gets_a_new_worker(target):
    draft = tiny_draft()
    with hf_ssd.launch_draft(draft, num_threads=1) as assistant:
        old, hits = assistant.workers[0].process, call(target, assistant).hit_rate
        draft.to(torch.bfloat16)
        stats = call(target, ready(assistant))
        assert hits > 0 and modes(stats) == {AHEAD} and stats.hit_rate > 0
        assert not old.is_running and assistant.workers[0].process.is_running


def test_a_model_on_an_accelerator_takes_new_weights(monkeypatch):
    draft, taken = tiny_draft(), []
    weights = SharedWeights(draft)
    weights.fill()
    description = json.loads(json.dumps(weights.description))
    elsewhere = tiny_model(seed=5)  # stands in for a model that was moved
    copy_shared_weights(elsewhere, description)
    draft.load_state_dict(tiny_model(seed=7).state_dict())
    assert weights.fill() == 1
    copy_shared_weights(elsewhere, description)
    for ours, theirs in zip(draft.parameters(), elsewhere.parameters()):
        assert torch.equal(ours, theirs)
    weights.close()
    server = DraftServer(None, model_from_shared_weights, description)
    monkeypatch.setattr(draft_server, "copy_shared_weights", lambda *given: taken.append(given))
    for kind in ("cpu", "cuda"):
        server.model = type("Model", (), {"device": torch.device(kind)})()
        server._take_new_weights(2)
    assert taken == [(server.model, description)]


# ---------------------------------------------------------------- drafts that a worker cannot rebuild


class Packed(torch.Tensor):
    pass


def pack_a_weight(draft, folder):
    layer = draft.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Packed), requires_grad=False)


def add_a_hook(draft, folder):
    draft.model.layers[1].register_forward_hook(lambda module, inputs, output: output * 1.1)


def replace_a_forward(draft, folder):
    mlp = draft.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda inputs: forward(inputs) * 1.1


CHANGED = {  # adapters are refused in tests/conformance/test_errors.py
    lambda draft, _: torch.ao.quantization.quantize_dynamic(draft, {torch.nn.Linear}, dtype=torch.qint8): (
        "`model.layers.0.self_attn.q_proj` is torch.ao.nn.quantized.dynamic.modules.linear.Linear "
        "and would be torch.nn.modules.linear.Linear"
    ),
    lambda draft, _: setattr(draft.model, "layers", draft.model.layers[:2]): (
        "`model.layers.2` is missing and would be transformers.models.llama.modeling_llama.LlamaDecoderLayer"
    ),
    lambda draft, _: setattr(draft.model.layers[0], "input_layernorm", torch.nn.Identity()): (
        "is torch.nn.modules.linear.Identity and would be"
    ),
    lambda draft, _: setattr(draft, "__class__", type("Local", (type(draft),), {})): (
        "another process cannot import; save the draft with save_pretrained"
    ),
    pack_a_weight: "up_proj.weight` is no plain tensor, but a tests.distributed.test_weights.Packed",
    add_a_hook: "`model.layers.1` is .*LlamaDecoderLayer with forward hooks and would be",
    replace_a_forward: "`model.layers.0.mlp` is .*LlamaMLP with a forward of its own and would be",
    lambda draft, folder: disk_offload(draft, folder, execution_device=torch.device("cpu")): (
        "Not all weights of the draft are in memory"
    ),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_draft_that_a_worker_cannot_rebuild(target, change, tmp_path, logged):
    draft, before = tiny_model(), children()
    draft = change(draft, tmp_path) or draft
    here = call(target, draft, settings={"asynchronous": False}).acceptance_rate
    with pytest.raises(ValueError, match=CHANGED[change]) as error:
        hf_ssd.launch_draft(draft)
    assert "\n" not in str(error.value)
    for _ in range(3):
        stats = call(target, draft)
        assert modes(stats) == {IN_TURN} and stats.acceptance_rate == here
    assert children() == before
    (warning,) = logged.messages
    assert warning == f"The draft works in turn with the target, in this process. {error.value}"


def test_a_draft_that_a_worker_can_rebuild_again(target):
    draft = tiny_draft()
    hook = draft.model.register_forward_hook(lambda module, inputs, output: None)
    assert modes(call(target, draft)) == {IN_TURN} and assistant_for(draft) is None
    hook.remove()
    draft(torch.tensor([[3, 5]]), output_hidden_states=True)  # transformers' own hooks are no hindrance
    ready(assistant_for(draft))
    draft(torch.tensor([[3, 5]]), output_attentions=True)
    assert modes(call(target, draft)) == {AHEAD}


def test_a_model_without_weights_is_refused_before_work(target):
    with torch.device("meta"):
        draft = tiny_model()
    with pytest.raises(ValueError, match="LlamaForCausalLM has no weights, only their shapes"):
        target.generate(torch.tensor([[3, 5]]), max_new_tokens=2, assistant_model=draft, ssd_config=CONFIG)
