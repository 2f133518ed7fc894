"""Hooks, forwards and adapters that were attached to a target: its tokens are plain generate()'s, or a sentence names
what was attached."""

import contextlib
import functools
import re
import types

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model

import hf_ssd
from hf_ssd.cache import trial
from hf_ssd.cache.cached_model import CachedModel
from hf_ssd.cache.trial import check_supported
from hf_ssd.generation.target import Features

from ..helpers import tiny
from ..helpers.comparing import settings
from ..helpers.families import sharp_model, tiny_config
from ..helpers.heads import expected_features, tiny_head
from ..helpers.tiny import VOCAB, padded_batch, tiny_draft, tiny_model

OPTIONS = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
ENDS = {"eos_token_id": [5, 9, 11, 23, 41]}


@pytest.fixture
def target():
    return hf_ssd.enable(tiny_model())


def speculated(target, draft, rows=2, generate=None, least=1.2, **options):
    return tiny.speculated(target, draft, padded_batch(rows), {"lookahead": 4}, generate, least, **OPTIONS | options)


def refusal(generate, draft, **inputs):
    with pytest.raises(ValueError) as error:
        generate(**(inputs or padded_batch(2)), **OPTIONS, **settings(draft))
    return str(error.value)


def steering(tokens=slice(None), strength=2.0):
    """A hook that adds a vector to the hidden states of some tokens of a pass, as steering-vectors does."""
    vector = strength * torch.randn(32, generator=torch.Generator().manual_seed(1))

    def add_vector(module, inputs, output):
        output[:, tokens] += vector
        return output

    return add_vector


@contextlib.contextmanager
def hooked(module, hook):
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


# ---------------------------------------------------------------- hooks and forwards


@pytest.mark.parametrize(
    "tokens, is_called_before, dtype",
    [
        (slice(-1, None), True, torch.float32),
        (slice(-1, None), True, torch.bfloat16),
        (slice(3, None), False, torch.float32),
        (slice(4, None), False, torch.bfloat16),
        (slice(None, 2), False, torch.float32),
    ],
)
def test_a_hook_that_acts_on_some_tokens_of_a_pass_is_refused_by_its_name(tokens, is_called_before, dtype, draft):
    target = hf_ssd.enable(tiny_model().to(dtype))
    if is_called_before:
        target.generate(**padded_batch(2), **OPTIONS, **settings(draft))
    with hooked(target.model.layers[1], steering(tokens)):
        said = refusal(target.generate, draft)
        assert "forward hook `" in said and "add_vector` on `model.layers.1`" in said and "mask" not in said
    output = target.generate(**padded_batch(2), **OPTIONS, **settings(draft), return_dict_in_generate=True)
    assert output.ssd_stats.tokens_per_round > 1.2


def test_a_hook_that_acts_on_every_token_speculates(target, draft):
    plain = target.generate(**padded_batch(2), **OPTIONS)
    with hooked(target.model.layers[1], steering(strength=0.3)):
        output = speculated(target, draft)
    assert not torch.equal(output.sequences, plain)


@pytest.mark.slow
def test_a_hook_that_only_reads_speculates_and_is_tried_once(target, draft, monkeypatch):
    tried, try_it = [], trial._try
    monkeypatch.setattr(trial, "_try", lambda model, *others: tried.append(model) or try_it(model, *others))
    read = []
    with hooked(target.model.layers[0], lambda module, inputs, output: read.append(output.shape)):
        for _ in range(2):
            speculated(target, draft, rows=3, **ENDS)
    assert len(read) > 20 and tried.count(target) == 1


def by_wraps(model):
    forward = model.forward

    @functools.wraps(forward)
    def doubled(*arguments, **options):
        outputs = forward(*arguments, **options)
        outputs.logits = outputs.logits * 2
        return outputs

    model.forward = doubled


def by_partial(model):
    layer = model.model.layers[1]
    forward = type(layer).forward
    layer.forward = functools.partial(lambda module, *a, **k: forward(module, *a, **k) * 0.5, layer)


def with_a_list_of_layers(model):
    model.model.order = [model.model.layers[1], model.model.layers[0]]
    inner = model.model.layers[2].mlp
    forward = inner.forward
    inner.forward = lambda states: forward(states) + model.model.order[0].mlp(states)


@pytest.mark.slow
@pytest.mark.parametrize("change", [by_wraps, by_partial, with_a_list_of_layers])
def test_a_model_that_was_changed_after_its_first_call_is_seen_as_it_is(change, target, draft):
    """And a head reads the states of its layers."""
    speculated(target, draft)
    change(target)
    head, seen, add = tiny_head(target, layers=[2, 3]), [], Features.add
    plain = target.generate(**padded_batch(1), **OPTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Features, "add", lambda self, states, k: seen.append(self) or add(self, states, k))
        speculated(target, head, rows=1, least=0.9)
    length = seen[-1].lengths[0]
    expected = expected_features(target, plain[0], [2, 3])[:length]
    torch.testing.assert_close(seen[-1].values[0, :length], expected, atol=1e-4, rtol=1e-4)


def test_a_global_hook_is_refused_by_its_name(target, draft):
    check_supported(target)

    def steer_layers(module, inputs, output):
        return output + 1.0 * (torch.arange(output.shape[1]) > 2)[:, None] if module is target.model.layers[1] else None

    with torch.nn.modules.module.register_module_forward_hook(steer_layers):
        assert re.search("the global forward hook `.*steer_layers`", refusal(target.generate, draft))


@pytest.mark.parametrize("place", ["instance", "class"])
def test_a_replaced_forward_is_refused_by_its_name(place, target, draft, monkeypatch):
    check_supported(target)
    layer = target.model.layers[1]
    forward = type(layer).forward

    def steered(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output[:, -1] += 2.0
        return output

    if place == "instance":
        layer.forward = types.MethodType(steered, layer)
    else:
        monkeypatch.setattr(type(layer), "forward", steered)
    said = refusal(target.generate, draft)
    assert place == "class" or "steered` in place of the `forward` of `model.layers.1`" in said


def steer_a_row(tokens, strength):
    def steer_a_row(module, inputs, output):
        output[1, tokens] += strength
        return output

    return steer_a_row


def test_a_hook_that_acts_on_one_row_speculates_until_the_last_row_ends(target, draft):
    """Rows that have ended stay in the pass, in which the hook counts them."""
    with hooked(target.model.layers[1], steer_a_row(slice(None), 0.5)):
        lengths = (speculated(target, draft, rows=3, **ENDS).sequences != 0).sum(-1)
        assert lengths.min() < lengths.max()
        with pytest.raises((AssertionError, IndexError)), pytest.MonkeyPatch.context() as mutant:
            leave_out = CachedModel.leave_out

            def leaves_out(self, finished):
                self.keeps_rows = False
                leave_out(self, finished)

            mutant.setattr(CachedModel, "leave_out", leaves_out)
            speculated(target, draft, rows=3, **ENDS)


def test_a_hook_on_the_last_token_of_one_row_is_refused(target, draft):
    with hooked(target.model.layers[1], steer_a_row(-1, 2.0)):
        assert "steer_a_row" in refusal(target.generate, draft)


@pytest.mark.slow
def test_a_hook_on_a_model_that_is_fed_tokens_again_behind_its_states():
    """A pass of such a model is longer than its lookahead, and a hook that acts late in a pass is seen."""
    target, draft = hf_ssd.enable(sharp_model(tiny_config("lfm2"))), tiny_model()
    plain = target.generate(**padded_batch(2), **OPTIONS)
    with hooked(target.model.layers[1], lambda module, inputs, output: None):
        output = target.generate(**padded_batch(2), **OPTIONS, **settings(draft), return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain) and output.ssd_stats.draft_failure is None
    with hooked(target.model.layers[1], steering(slice(20, None))):
        assert "add_vector" in refusal(target.generate, draft)


def test_a_draft_with_a_hook_drafts(target):
    draft = tiny_draft()
    with hooked(draft.model.layers[1], steering(strength=0.1)):
        speculated(target, draft, rows=3, **ENDS)


# ---------------------------------------------------------------- adapters


def lora(model=None, name="default", seed=0, **settings):
    torch.manual_seed(seed)
    settings |= {"target_modules": ["q_proj", "v_proj"], "r": 4, "init_lora_weights": False}
    config = LoraConfig(task_type="CAUSAL_LM", **settings)
    if model is None:
        return get_peft_model(tiny_model(), config, name).eval()
    model.add_adapter(name, config)
    return model.eval()


def generate_of(model, is_enabled):
    return hf_ssd.enable(model).generate if is_enabled else functools.partial(hf_ssd.generate, model)


def test_lora_speculates_with_the_adapter_that_is_active(draft):
    model, seen = lora(lora(), "other", seed=1), []
    generate = generate_of(model, is_enabled=True)
    for name in ("default", "other"):
        model.set_adapter(name)
        seen.append(speculated(model, draft, 2, generate, 1.0).sequences)
    with model.disable_adapter():
        seen.append(speculated(model, draft, 2, generate, 1.0).sequences)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


def test_a_draft_with_an_adapter_drafts_and_prompt_tuning_is_refused(target):
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4)
    speculated(target, get_peft_model(tiny_draft(), config).eval())
    tuned = get_peft_model(tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="Prompt and prefix tuning"):
        hf_ssd.enable(tuned)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_an_activated_lora_is_refused_by_its_name(is_enabled, draft):
    model, inputs = lora(name="judge", alora_invocation_tokens=[7, 8]), padded_batch(1)
    generate = generate_of(model, is_enabled)
    inputs["input_ids"][:, -4:-2] = torch.tensor([7, 8])
    with model.disable_adapter():
        without = model.generate(**inputs, **OPTIONS)
        if not is_enabled:  # it is found although the model has been tried
            assert torch.equal(generate(**inputs, **OPTIONS, **settings(draft)), without)
    assert not torch.equal(model.generate(**inputs, **OPTIONS), without)
    said = refusal(generate, draft, **inputs)
    assert "adapter 'judge' is an activated LoRA " in said and "disable the adapter" in said


@pytest.mark.slow
def test_rows_with_adapters_of_their_own_speculate(draft):
    model, names = lora(lora(), "other", seed=1), {"adapter_names": ["default", "other", "__base__"]}
    generate = generate_of(model, is_enabled=False)
    generate(**padded_batch(3), **{**OPTIONS, **ENDS}, **settings(draft))
    found = speculated(model, draft, 3, generate, 1.05, **ENDS, **names).sequences
    assert not torch.equal(found, model.generate(**padded_batch(3), **{**OPTIONS, **ENDS}))
    lengths = (found != 0).sum(-1)
    assert lengths.min() < lengths.max() and found.max() < VOCAB
