"""The draft's weights are shared with its worker: they stay as the user left them, and the draft works with them."""

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

from ..helpers.processes import children
from ..helpers.tiny import FAMILIES, VOCAB, ready, tiny_draft, tiny_model

CONFIG = hf_ssd.SSDConfig(lookahead=3, budget=8, fan_out="uniform")


def call(target, draft, length=8, new_tokens=12, config=CONFIG):
    """Returns the stats of a call whose tokens are plain generation's."""
    ids, options = torch.arange(length)[None] % 90 + 3, {"do_sample": False, "max_new_tokens": new_tokens}
    output = target.generate(ids, **options, assistant_model=draft, ssd_config=config, return_dict_in_generate=True)
    assert torch.equal(output.sequences, target.generate(ids, **options))
    assert output.ssd_stats.draft_failure is None
    return output.ssd_stats


def modes(stats):
    return {record.mode for record in stats.records}


@pytest.fixture
def logged(caplog):
    logging.enable_propagation()
    yield caplog
    logging.disable_propagation()


# ---------------------------------------------------------------- the copy that processes share


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_rebuilt_over_the_same_memory(family, tied):
    model = tiny_model(family, tie_word_embeddings=tied)
    tokens = torch.randint(2, VOCAB, (1, 8))
    with torch.inference_mode():
        expected = model(tokens).logits
    weights = SharedWeights(model)
    assert weights.fill() == 0 == weights.fill()
    other = model_from_shared_weights(json.loads(json.dumps(weights.description)))
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits, expected)
        assert torch.equal(other(tokens).logits, expected)
    assert type(other) is type(model)
    assert (other.lm_head.weight is other.get_input_embeddings().weight) == tied
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    assert weights.fill() == 1
    for ours, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(ours, theirs)
    weights.close()


def test_a_buffer_without_elements_is_not_taken_for_the_next_one():
    model = tiny_model()
    model.register_buffer("empty", torch.empty(0))
    weights = SharedWeights(model)
    weights.fill()
    other = model_from_shared_weights(weights.description)
    assert not other.empty.numel()
    assert torch.equal(other.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    weights.close()


def test_an_enabled_model_is_rebuilt_as_its_own_class():
    model = hf_ssd.enable(tiny_model())
    weights = SharedWeights(model)
    assert weights.description["model_class"] == "transformers.models.llama.modeling_llama:LlamaForCausalLM"
    weights.close()


def test_the_memory_has_no_name():
    before = set(os.listdir("/dev/shm"))
    weights = SharedWeights(tiny_model())
    weights.fill()
    assert set(os.listdir("/dev/shm")) == before
    weights.close()


def test_a_class_that_cannot_be_imported_is_refused():
    class Local(type(tiny_model())):
        pass

    model = tiny_model()
    model.__class__ = Local
    with pytest.raises(ValueError, match="save the draft with save_pretrained"):
        SharedWeights(model)


def test_the_first_call_does_not_copy_the_weights_of_its_draft(target, monkeypatch):
    """The thread that starts the worker does. A later call copies them only where they have changed."""
    threads, fill = [], SharedWeights.fill
    copied = lambda self, before: self.version > before and threads.append(threading.current_thread())  # noqa: E731
    monkeypatch.setattr(
        SharedWeights, "fill", lambda self: (before := self.version, fill(self), copied(self, before))[1]
    )
    draft = tiny_draft()
    inputs = {"input_ids": torch.tensor([[3, 5, 7]]), "max_new_tokens": 4, "assistant_model": draft}
    for _ in range(2):
        target.generate(**inputs, ssd_config=hf_ssd.SSDConfig(lookahead=2, budget=2))
        ready(assistant_for(draft))
    assert len(threads) == 1 and threads[0] is not threading.main_thread()
    with torch.no_grad():
        draft.lm_head.weight.mul_(2)
    target.generate(**inputs, ssd_config=hf_ssd.SSDConfig(lookahead=2, budget=2))
    assert threads[1:] == [threading.main_thread()]


# ---------------------------------------------------------------- nothing of the user's is written


def snapshot(model):
    return {name: (tensor.dtype, tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}


def assert_untouched(model, before):
    for name, tensor in model.state_dict().items():
        dtype, address, values = before[name]
        assert tensor.dtype == dtype and tensor.data_ptr() == address and torch.equal(tensor, values), name


@torch.no_grad()
def fill(draft):
    draft.model.layers[1].mlp.up_proj.weight.fill_(0.5)


def load_a_state(draft):
    draft.load_state_dict(tiny_model(seed=5).state_dict())


def take_a_step(draft):
    optimizer = torch.optim.SGD(draft.parameters(), lr=0.1)
    draft(torch.tensor([[3, 5, 7]]), labels=torch.tensor([[3, 5, 7]])).loss.backward()
    optimizer.step()


def halve(draft):
    draft.to(torch.bfloat16)


@pytest.mark.parametrize("change", [fill, load_a_state, take_a_step, halve])
def test_weights_that_change_after_the_worker_copied_them_stay_changed(target, change):
    draft = tiny_draft()
    call(target, draft, new_tokens=2)  # which starts the worker
    assistant_for(draft).workers[0].thread.join(60)
    change(draft)
    before = snapshot(draft)
    ready(assistant_for(draft))
    assert modes(call(target, draft)) == {AHEAD}
    assert_untouched(draft, before)


def test_modules_that_draft_and_target_share_stay_the_target_s():
    target, draft = hf_ssd.enable(tiny_model()), tiny_draft()
    draft.model.embed_tokens, draft.lm_head = target.model.embed_tokens, target.lm_head
    call(target, draft, new_tokens=2)
    assistant_for(draft).workers[0].thread.join(60)
    target.load_state_dict(tiny_model(seed=7).state_dict())
    before = snapshot(target)
    ready(assistant_for(draft))
    assert modes(call(target, draft)) == {AHEAD}
    assert_untouched(target, before)


def test_a_draft_that_is_given_up_after_its_worker_was_started_leaves_memory():
    draft = tiny_draft()
    with hf_ssd.launch_draft(draft, num_threads=1):
        gone = weakref.ref(draft)
        del draft
        gc.collect()
        assert gone() is None


# ---------------------------------------------------------------- a running worker has the weights as they are


def copy(draft, state):
    draft.load_state_dict(state)


def assign(draft, state):
    draft.load_state_dict(state, assign=True)


def set_data(draft, state):
    for name, parameter in draft.named_parameters():
        parameter.data = state[name].clone()


def write_through_data(draft, state):
    for name, parameter in draft.named_parameters():
        parameter.data.copy_(state[name])


@pytest.mark.parametrize("change", [copy, assign, set_data, write_through_data])
def test_a_running_worker_drafts_with_new_weights(target, change):
    draft = tiny_model(seed=5)
    with hf_ssd.launch_draft(draft, num_threads=1) as assistant:
        assert call(target, assistant).acceptance_rate < 0.3
        change(draft, {name: tensor.clone() for name, tensor in target.state_dict().items()})
        stats = call(target, assistant)
        assert modes(stats) == {AHEAD} and stats.acceptance_rate == 1 and assistant.restarts == 0


def test_keys_and_values_of_old_weights_are_dropped(target):
    """The second call's text goes on from the first one's, whose cache the worker has kept."""
    draft = tiny_model(seed=5)
    with hf_ssd.launch_draft(draft, num_threads=1) as assistant:
        call(target, assistant, length=100)
        draft.load_state_dict(target.state_dict())
        stats = call(target, assistant, length=110, new_tokens=30)
        assert modes(stats) == {AHEAD} and stats.acceptance_rate == 1


def test_weights_that_were_made_in_inference_mode(target):
    with torch.inference_mode():  # such tensors have no version
        draft = tiny_model(seed=5)
        draft.requires_grad_(False)
        call(target, draft, new_tokens=2)
        ready(assistant_for(draft))
        assert call(target, draft).acceptance_rate < 0.3
        draft.load_state_dict(target.state_dict())
    stats = call(target, draft)
    assert modes(stats) == {AHEAD} and stats.acceptance_rate == 1


@pytest.mark.parametrize("is_launched", [True, False])
def test_a_draft_of_another_dtype_gets_a_new_worker(target, is_launched):
    draft = tiny_draft()
    given = hf_ssd.launch_draft(draft, num_threads=1) if is_launched else draft
    assistant = given if is_launched else ready(assistant_for(draft))
    old, hits = assistant.workers[0].process, call(target, given).hit_rate
    draft.to(torch.bfloat16)
    assistant = ready(given if is_launched else assistant_for(draft))
    stats = call(target, given)
    assert hits > 0 and modes(stats) == {AHEAD} and stats.hit_rate > 0
    assert not old.is_running and assistant.workers[0].process.is_running
    assistant.close()


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


def quantize_dynamically(draft, folder):
    return torch.ao.quantization.quantize_dynamic(draft, {torch.nn.Linear}, dtype=torch.qint8)


def cut_a_layer(draft, folder):
    draft.model.layers = draft.model.layers[:2]
    return draft


def replace_a_module(draft, folder):
    draft.model.layers[0].input_layernorm = torch.nn.Identity()
    return draft


class Wrapped(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, inputs):
        return 1.1 * self.inner(inputs)


def wrap_a_layer(draft, folder):
    draft.model.layers[0].mlp = Wrapped(draft.model.layers[0].mlp)
    return draft


class Packed(torch.Tensor):
    pass


def pack_a_weight(draft, folder):
    layer = draft.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Packed), requires_grad=False)
    return draft


def add_a_hook(draft, folder):
    draft.model.layers[1].register_forward_hook(lambda module, inputs, output: output * 1.1)
    return draft


def replace_a_forward(draft, folder):
    mlp = draft.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda inputs: forward(inputs) * 1.1
    return draft


def offload_to_disk(draft, folder):
    disk_offload(draft, folder, execution_device=torch.device("cpu"))
    return draft


def add_an_adapter(draft, folder):
    adapter = type("Linear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    draft.model.layers[0].mlp.up_proj.__class__ = adapter
    return draft


CHANGED = {
    quantize_dynamically: "`model.layers.0.self_attn.q_proj` is torch.ao.nn.quantized.dynamic.modules.linear.Linear "
    "and would be torch.nn.modules.linear.Linear",
    cut_a_layer: "`model.layers.2` is missing and would be transformers.models.llama.modeling_llama.LlamaDecoderLayer",
    replace_a_module: "is torch.nn.modules.linear.Identity and would be",
    wrap_a_layer: r"is tests.distributed.test_weights.Wrapped and would be",
    pack_a_weight: "up_proj.weight` is no plain tensor, but a tests.distributed.test_weights.Packed",
    add_a_hook: "`model.layers.1` is .*LlamaDecoderLayer with forward hooks and would be",
    replace_a_forward: "`model.layers.0.mlp` is .*LlamaMLP with a forward of its own and would be",
    offload_to_disk: "Not all weights of the draft are in memory",
    add_an_adapter: "The draft has adapters in its layers",
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_draft_that_a_worker_cannot_rebuild(target, change, tmp_path, logged):
    draft, before = change(tiny_model(), tmp_path), children()
    here = call(target, draft, config=hf_ssd.SSDConfig(lookahead=3, asynchronous=False)).acceptance_rate
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
    ready(assistant_for(draft))
    assert modes(call(target, draft)) == {AHEAD}


def test_hooks_with_which_transformers_captures_outputs_are_no_hindrance(target):
    draft = tiny_draft()
    draft(torch.tensor([[3, 5]]), output_hidden_states=True)
    ready(assistant_for(draft))
    draft(torch.tensor([[3, 5]]), output_attentions=True)
    assert modes(call(target, draft)) == {AHEAD}


def test_a_model_without_weights_is_refused_before_work(target):
    with torch.device("meta"):
        draft = tiny_model()
    with pytest.raises(ValueError, match="LlamaForCausalLM has no weights, only their shapes"):
        target.generate(torch.tensor([[3, 5]]), max_new_tokens=2, assistant_model=draft, ssd_config=CONFIG)
    with pytest.raises(ValueError, match="pass the folder or hub id"):
        hf_ssd.launch_draft(draft, num_threads=1)
