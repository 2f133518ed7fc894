"""Hooks, forwards and adapters that were attached to a target: its tokens are plain generate()'s, or a sentence names
what was attached."""

import contextlib
import functools
import types

import pytest
import torch
from peft import LoraConfig, get_peft_model

import hf_ssd
from hf_ssd.cache import trial
from hf_ssd.cache.attached import attached_to
from hf_ssd.cache.cached_model import CachedModel
from hf_ssd.cache.trial import check_supported

from ..helpers.families import sharp_model, tiny_config
from ..helpers.tiny import VOCAB, padded_batch, tiny_draft, tiny_model

OPTIONS = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
IN_TURN = hf_ssd.SSDConfig(lookahead=4, asynchronous=False)


@pytest.fixture
def target():
    return hf_ssd.enable(tiny_model())


def speculated(target, draft, rows=2, **options):
    """Returns the output of a call that speculates, and checks that its tokens are those of plain generation."""
    options, inputs = {**OPTIONS, **options}, padded_batch(rows)
    plain = target.generate(**inputs, **options, ssd_config=None)
    settings = {"assistant_model": draft, "ssd_config": IN_TURN, "return_dict_in_generate": True}
    output = target.generate(**inputs, **options, **settings)
    assert torch.equal(output.sequences, plain)
    assert output.ssd_stats.draft_failure is None and output.ssd_stats.tokens_per_round > 1.2
    return output


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


SLICES = [slice(-1, None), slice(3, None), slice(4, None), slice(None, 2)]


@pytest.mark.parametrize(
    "tokens, is_called_before, dtype",
    [
        *((tokens, before, torch.float32) for tokens in SLICES for before in (True, False)),
        (SLICES[0], True, torch.bfloat16),
        (SLICES[2], False, torch.bfloat16),
    ],
)
def test_a_hook_that_acts_on_some_tokens_of_a_pass_is_refused_by_its_name(tokens, is_called_before, dtype, draft):
    target, settings = hf_ssd.enable(tiny_model().to(dtype)), {"assistant_model": draft, "ssd_config": IN_TURN}
    if is_called_before:
        target.generate(**padded_batch(2), **OPTIONS, **settings)
    with hooked(target.model.layers[1], steering(tokens)):
        with pytest.raises(ValueError, match=r"forward hook `.*add_vector` on `model.layers.1`") as error:
            target.generate(**padded_batch(2), **OPTIONS, **settings)
        assert "mask" not in str(error.value)
    output = target.generate(**padded_batch(2), **OPTIONS, **settings, return_dict_in_generate=True)
    assert output.ssd_stats.tokens_per_round > 1.2


def test_a_hook_that_acts_on_every_token_speculates(target, draft):
    plain = target.generate(**padded_batch(2), **OPTIONS)
    with hooked(target.model.layers[1], steering(strength=0.3)):
        output = speculated(target, draft)
    assert not torch.equal(output.sequences, plain)


def test_a_hook_that_only_reads_speculates_and_is_tried_once(target, draft, monkeypatch):
    tried, try_it = [], trial._try
    monkeypatch.setattr(trial, "_try", lambda model, *others: tried.append(model) or try_it(model, *others))
    read = []
    with hooked(target.model.layers[0], lambda module, inputs, output: read.append(output.shape)):
        for _ in range(2):
            speculated(target, draft, rows=3, eos_token_id=[5, 9, 11, 23, 41])
    assert len(read) > 20 and tried.count(target) == 1


def test_a_global_hook_is_refused_by_its_name(target, draft):
    check_supported(target)

    def steer_layers(module, inputs, output):
        return output + 1.0 * (torch.arange(output.shape[1]) > 2)[:, None] if module is target.model.layers[1] else None

    handle = torch.nn.modules.module.register_module_forward_hook(steer_layers)
    try:
        with pytest.raises(ValueError, match=r"the global forward hook `.*steer_layers`"):
            target.generate(**padded_batch(2), **OPTIONS, assistant_model=draft, ssd_config=IN_TURN)
    finally:
        handle.remove()


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
    with pytest.raises(ValueError) as error:
        target.generate(**padded_batch(2), **OPTIONS, assistant_model=draft, ssd_config=IN_TURN)
    if place == "instance":
        assert "steered` in place of the `forward` of `model.layers.1`" in str(error.value)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_hook_that_acts_on_one_row_speculates_until_the_last_row_ends(row, target, draft):
    """Rows that have ended stay in the pass, in which the hook counts them."""

    def steer_a_row(module, inputs, output):
        output[row] += 0.5
        return output

    ends = {"eos_token_id": [5, 9, 11, 23, 41]}
    with hooked(target.model.layers[1], steer_a_row):
        output = speculated(target, draft, rows=3, **ends)
        lengths = (output.sequences != 0).sum(-1)
        assert lengths.min() < lengths.max()
        with pytest.raises((AssertionError, IndexError)), pytest.MonkeyPatch.context() as mutant:
            leave_out = CachedModel.leave_out

            def leaves_out(self, finished):
                self.keeps_rows = False
                leave_out(self, finished)

            mutant.setattr(CachedModel, "leave_out", leaves_out)
            speculated(target, draft, rows=3, **ends)


def test_a_hook_on_the_last_token_of_one_row_is_refused(target, draft):
    def steer_a_row(module, inputs, output):
        output[1, -1] += 2.0
        return output

    with hooked(target.model.layers[1], steer_a_row), pytest.raises(ValueError, match="steer_a_row"):
        target.generate(**padded_batch(2), **OPTIONS, assistant_model=draft, ssd_config=IN_TURN)


def test_a_hook_on_a_model_that_is_fed_tokens_again_behind_its_states():
    """A pass of such a model is longer than its lookahead, and a hook that acts late in a pass is seen."""
    target = hf_ssd.enable(sharp_model(tiny_config("lfm2")))
    settings = {"assistant_model": tiny_model(), "ssd_config": IN_TURN, "return_dict_in_generate": True}
    plain = target.generate(**padded_batch(2), **OPTIONS, ssd_config=None)
    with hooked(target.model.layers[1], lambda module, inputs, output: None):
        output = target.generate(**padded_batch(2), **OPTIONS, **settings)
    assert torch.equal(output.sequences, plain) and output.ssd_stats.draft_failure is None
    with hooked(target.model.layers[1], steering(slice(20, None))), pytest.raises(ValueError, match="add_vector"):
        target.generate(**padded_batch(2), **OPTIONS, **settings)


def test_a_draft_with_a_hook_drafts(target):
    draft = tiny_draft()
    with hooked(draft.model.layers[1], steering(strength=0.1)):
        speculated(target, draft, rows=3, eos_token_id=[5, 9, 11, 23, 41])


def test_what_is_attached_is_found_in_a_moment():
    """What each call asks, in the order in which it happens: nothing is remembered that was removed."""
    model = tiny_model()
    before = attached_to(model)
    assert before == attached_to(model) and not before.may_depend_on_tokens
    with hooked(model.lm_head, steering()):
        first = attached_to(model)
        assert first.may_depend_on_rows and first != before
    assert attached_to(model) == before
    with hooked(model.lm_head, steering()):
        assert attached_to(model) != first


# ---------------------------------------------------------------- adapters


def lora(model=None, name="default", seed=0, **settings):
    torch.manual_seed(seed)
    config = LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False, **settings
    )
    if model is None:
        return get_peft_model(tiny_model(), config, name).eval()
    model.add_adapter(name, config)
    return model.eval()


def settings_of(draft):
    return {"assistant_model": draft, "ssd_config": IN_TURN}


@pytest.mark.parametrize("is_enabled", [True, False])
def test_lora_speculates_with_the_adapter_that_is_active(is_enabled, draft):
    model = lora(lora(), "other", seed=1)
    if is_enabled:
        hf_ssd.enable(model)
    generate = model.generate if is_enabled else functools.partial(hf_ssd.generate, model)
    inputs, seen = padded_batch(2), []
    for name in ("default", "other"):
        model.set_adapter(name)
        seen.append(model.generate(**inputs, **OPTIONS))
        assert torch.equal(generate(**inputs, **OPTIONS, **settings_of(draft)), seen[-1])
    with model.disable_adapter():
        seen.append(model.generate(**inputs, **OPTIONS))
        assert torch.equal(generate(**inputs, **OPTIONS, **settings_of(draft)), seen[-1])
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("is_enabled, is_called_before", [(True, False), (False, True)])
def test_an_activated_lora_is_refused_by_its_name(is_called_before, is_enabled, draft):
    model = lora(name="judge", alora_invocation_tokens=[7, 8])
    if is_enabled:
        hf_ssd.enable(model)
    generate = model.generate if is_enabled else functools.partial(hf_ssd.generate, model)
    inputs = padded_batch(1)
    inputs["input_ids"][:, -4:-2] = torch.tensor([7, 8])
    plain = model.generate(**inputs, **OPTIONS)
    with model.disable_adapter():
        without = model.generate(**inputs, **OPTIONS)
        if is_called_before:
            output = generate(**inputs, **OPTIONS, **settings_of(draft), return_dict_in_generate=True)
            assert torch.equal(output.sequences, without) and output.ssd_stats.tokens_per_round > 1.2
    assert not torch.equal(plain, without)
    with pytest.raises(ValueError, match="adapter 'judge' is an activated LoRA .*disable the adapter"):
        generate(**inputs, **OPTIONS, **settings_of(draft))


@pytest.mark.parametrize("is_enabled, is_called_before", [(True, False), (False, True)])
def test_rows_with_adapters_of_their_own_speculate(is_called_before, is_enabled, draft):
    model = lora(lora(), "other", seed=1)
    if is_enabled:
        hf_ssd.enable(model)
    generate = model.generate if is_enabled else functools.partial(hf_ssd.generate, model)
    inputs, options = padded_batch(3), {**OPTIONS, "eos_token_id": [5, 9, 11, 23, 41]}
    if is_called_before:
        generate(**inputs, **options, **settings_of(draft))
    names = {"adapter_names": ["default", "other", "__base__"]}
    plain = model.generate(**inputs, **options, **names)
    output = generate(**inputs, **options, **names, **settings_of(draft), return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain) and output.ssd_stats.tokens_per_round > 1.05
    assert not torch.equal(plain, model.generate(**inputs, **options))
    lengths = (plain != 0).sum(-1)
    assert lengths.min() < lengths.max() and plain.max() < VOCAB
