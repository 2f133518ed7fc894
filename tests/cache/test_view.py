"""Views of a model: the passes of a view are those of the model, and the model shows no trace of the view."""

import functools
import gc
import weakref

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from hf_ssd.cache.attention import GROUPED
from hf_ssd.cache.cached_model import CachedModel, view_for_passes
from hf_ssd.cache.hidden_states import HiddenStates, hooked_modules
from hf_ssd.cache.ragged import RaggedCache

from ..helpers.heads import expected_features
from ..helpers.tiny import SIZES, tiny_model

TOKENS = torch.tensor([[5, 7, 11, 13]])


def logits(model):
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits


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


def by_accelerate(model):
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))


def by_torch(model):
    model.compile(backend="eager")


def with_a_layer_twice(model):
    model.model.layers[2] = model.model.layers[0]


def with_a_list_of_layers(model):
    model.model.order = [model.model.layers[1], model.model.layers[0]]
    inner = model.model.layers[2].mlp
    forward = inner.forward
    inner.forward = lambda states: forward(states) + model.model.order[0].mlp(states)


def with_a_hook(model):
    model.model.layers[1].register_forward_hook(lambda module, inputs, output: output * 1.5)


CHANGES = (by_wraps, by_partial, by_accelerate, by_torch, with_a_layer_twice, with_a_list_of_layers, with_a_hook)


@pytest.mark.parametrize("change", CHANGES)
def test_a_view_computes_what_the_model_computes_and_its_layers_are_reached(change):
    model = tiny_model()
    before = logits(model)
    view_for_passes(model)  # which tries it, as no model with hooks is tried
    change(model)
    view = view_for_passes(model, hooked_modules(model, [2, 3]))
    captured = HiddenStates(view, [2, 3])
    torch.testing.assert_close(logits(view), logits(model))
    assert change is by_accelerate or change is by_torch or not torch.equal(logits(model), before)
    assert captured.take().shape == (1, 4, 2 * SIZES["hidden_size"])  # of the view's pass alone
    assert view.model.layers[1].self_attn.config._attn_implementation == GROUPED
    assert model.config._attn_implementation == "sdpa"


def test_a_view_sees_weights_and_hooks_that_change_later_and_the_model_sees_none_of_its_hooks():
    model = tiny_model()
    view = view_for_passes(model, hooked_modules(model, [0, 1, 3]))
    names, hooks = list(model.state_dict()), [dict(module._forward_hooks) for module in model.modules()]
    captured = HiddenStates(view, [0, 1, 3])
    assert hooks == [dict(module._forward_hooks) for module in model.modules()]
    assert list(model.state_dict()) == names == list(view.state_dict())
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.zeros(SIZES["intermediate_size"], 32))
    model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output * 3)
    torch.testing.assert_close(logits(view), logits(model))
    torch.testing.assert_close(captured.take()[0], expected_features(model, TOKENS[0], [0, 1, 3]))


def test_no_config_of_the_model_is_written_and_its_other_parts_keep_their_functions(monkeypatch):
    """So nothing is to be restored, and another thread never sees a value that is meant for our passes."""
    eyes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**eyes, image_size=28, patch_size=14)
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=LlamaConfig(**SIZES), vision_config=vision)).eval()
    model.set_attn_implementation({"vision_config": "eager", "text_config": "sdpa"})
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    configs |= {id(model.config.text_config): model.config.text_config}
    for kind in {type(config) for config in configs.values()}:
        write = kind.__setattr__

        def guarded(self, name, value, write=write):
            assert id(self) not in configs, f"{name} of the user's config is written"
            write(self, name, value)

        monkeypatch.setattr(kind, "__setattr__", guarded)
    with pytest.raises(AssertionError):
        model.config.use_cache = True
    decoder = CachedModel(model, RaggedCache())
    with torch.no_grad():
        decoder.extend(TOKENS, [0])
        decoder.extend(TOKENS, [4])
        with decoder.view._optimize_model_for_decode():
            decoder.extend(TOKENS, [8])
    assert decoder.has_grouped_heads and model.config.text_config._attn_implementation == "sdpa"
    assert decoder.view.model.language_model.config._attn_implementation == GROUPED
    assert decoder.view.config.vision_config._attn_implementation == "eager"


def test_a_model_is_collected_with_its_views():
    model = tiny_model()
    by_wraps(model)
    seen = weakref.ref(model), weakref.ref(view_for_passes(model).model)
    del model
    gc.collect()
    assert [one() for one in seen] == [None, None]


def test_a_part_that_is_compiled_by_itself_stays_compiled():
    model, calls = tiny_model(), []

    def backend(graph, inputs):
        return lambda *arguments: calls.append(1) or graph.forward(*arguments)

    model.model.layers[1].mlp.compile(backend=backend)
    view = view_for_passes(model)
    expected, before = logits(model), len(calls)
    torch.testing.assert_close(logits(view), expected)
    assert len(calls) == before + 1
