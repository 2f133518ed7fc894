"""Grouped heads folded into the queries: the same attention, without a copy of keys and values."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_ssd.cache import attention, masks
from hf_ssd.cache.attention import grouped_attention
from hf_ssd.cache.cached_model import CachedModel, view_for_passes
from hf_ssd.cache.ragged import RaggedCache
from hf_ssd.cache.view import view_of

from ..helpers.families import sharp_model, tiny_config
from ..helpers.tiny import FAMILIES, SIZES, tiny_model


class Layer(torch.nn.Module):
    """The part of an attention layer that attention functions read."""

    num_key_value_groups, is_causal = 4, True


def states(queries, columns, dtype=torch.float32, value_dim=8):
    generator = torch.Generator().manual_seed(queries)
    shapes = (3, 8, queries, 8), (3, 2, columns, 8), (3, 2, columns, value_dim)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def mask_of(queries, columns, dtype=torch.float32):
    generator = torch.Generator().manual_seed(columns)
    hidden = torch.rand(3, 1, queries, columns, generator=generator) < 0.5
    hidden[..., 0] = False
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)


def test_a_layer_that_asks_for_more_gets_the_function_of_transformers():
    inputs, mask = states(3, 9), mask_of(3, 9)
    bias = torch.randn(1, 8, 3, 9, generator=torch.Generator().manual_seed(1))
    ours, theirs = (
        f(Layer(), *inputs, mask, position_bias=bias)[0] for f in (grouped_attention, sdpa_attention_forward)
    )
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="softcap"):
        grouped_attention(Layer(), *inputs, mask, softcap=30.0)


def repeated_keys(decoder):
    """Returns how often a verification with that decoder copies keys or values for each head."""
    calls, repeat = [], sdpa_attention.repeat_kv
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa_attention, "repeat_kv", lambda *states: calls.append(1) or repeat(*states))
        decoder.extend(torch.tensor([[2, 3, 4]]), [0])
        decoder.extend(torch.tensor([[5, 6]]), [3])
    return len(calls)


def has_grouped_heads(model) -> bool:
    return CachedModel(model, RaggedCache()).has_grouped_heads


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_verification_copies_no_keys(family):
    model = tiny_model(family)
    decoder = CachedModel(model, RaggedCache())
    assert repeated_keys(decoder) == 0
    without = CachedModel(model, RaggedCache(), view=view_of(model)[0])
    assert repeated_keys(without) > 0  # what the test would see if the function were not used
    assert model.config._attn_implementation == "sdpa"


@torch.inference_mode()
def test_models_that_know_attention_functions_by_name_keep_theirs():
    """Falcon asks whether its implementation is "sdpa", and otherwise computes attention itself."""
    target = sharp_model(tiny_config("falcon"))
    assert not has_grouped_heads(target)
    eager = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES), attn_implementation="eager").eval()
    assert not has_grouped_heads(eager)


@torch.inference_mode()
def test_a_model_that_hides_nothing_under_another_name_keeps_its_own(monkeypatch):
    model, forward = tiny_model(), attention.grouped_attention

    def ignores_the_mask(module, query, key, value, mask, *args, **kwargs):
        return forward(module, query, key, value, torch.zeros_like(mask), *args, **kwargs)

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.GROUPED, ignores_the_mask)
    assert not has_grouped_heads(model)


def test_sparse_attention_keeps_its_name():
    """Such models apply the choice of their indexer only under the names `sdpa` and `eager`."""
    model = tiny_model()
    assert has_grouped_heads(model)
    model.config.layer_types = ["indexed_attention"] * model.config.num_hidden_layers
    assert not has_grouped_heads(model)


def test_other_parts_of_a_model_keep_their_functions():
    eyes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**eyes, image_size=28, patch_size=14)
    config = LlavaConfig(text_config=LlamaConfig(**SIZES), vision_config=vision)
    model = LlavaForConditionalGeneration(config).eval()
    model.set_attn_implementation({"vision_config": "eager", "text_config": "sdpa"})
    before = [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]
    assert {"eager", "sdpa"} <= set(before)
    view = view_for_passes(model)
    assert view.model.language_model.config._attn_implementation == attention.GROUPED
    assert view.config.vision_config._attn_implementation == "eager"
    after = [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]
    assert after == before


@pytest.mark.parametrize("width", [8, 13])
def test_rows_of_masks_are_aligned(width):
    allowed = torch.ones(2, 3, width, dtype=torch.bool)
    for mask in (masks.additive(allowed, torch.float32), masks.for_groups(mask_of(3, width), 4)):
        assert mask.shape[-1] == width and all(stride % masks.ALIGNMENT == 0 for stride in mask.stride()[:-1])
