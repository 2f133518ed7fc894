"""Grouped heads folded into the queries: the same attention, without a copy of keys and values."""

import pytest
import torch
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_ssd.cache import attention, masks
from hf_ssd.cache.attention import grouped_attention
from hf_ssd.cache.cached_model import CachedModel
from hf_ssd.cache.ragged import RaggedCache
from hf_ssd.cache.view import view_of

from ..helpers.tiny import FAMILIES, tiny_model


class Layer(torch.nn.Module):
    """The part of an attention layer that attention functions read."""

    num_key_value_groups, is_causal = 4, True


def mask_of(queries, columns):
    hidden = torch.rand(3, 1, queries, columns, generator=torch.Generator().manual_seed(columns)) < 0.5
    hidden[..., 0] = False
    return torch.zeros(hidden.shape).masked_fill_(hidden, torch.finfo(torch.float32).min)


def test_a_layer_that_asks_for_more_gets_the_function_of_transformers():
    generator, mask = torch.Generator().manual_seed(3), mask_of(3, 9)
    shapes = (3, 8, 3, 8), (3, 2, 9, 8), (3, 2, 9, 8), (1, 8, 3, 9)
    *inputs, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    functions = grouped_attention, sdpa_attention_forward
    torch.testing.assert_close(*(f(Layer(), *inputs, mask, position_bias=bias)[0] for f in functions))
    with pytest.raises(ValueError, match="softcap"):
        grouped_attention(Layer(), *inputs, mask, softcap=30.0)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_verification_copies_no_keys(family, monkeypatch):
    copies, repeat, model = [], sdpa_attention.repeat_kv, tiny_model(family)
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda *states: copies.append(1) or repeat(*states))
    for view in (None, view_of(model)[0]):  # the latter has the functions of transformers
        decoder = CachedModel(model, RaggedCache(), view=view)
        copies.clear()
        decoder.extend(torch.tensor([[2, 3, 4]]), [0])
        decoder.extend(torch.tensor([[5, 6]]), [3])
        assert bool(copies) == (view is not None)
    assert model.config._attn_implementation == "sdpa"


@torch.inference_mode()
def test_a_model_that_hides_nothing_under_another_name_keeps_its_own(monkeypatch):
    def ignores_the_mask(module, query, key, value, mask, *args, **kwargs):
        return grouped_attention(module, query, key, value, torch.zeros_like(mask), *args, **kwargs)

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.GROUPED, ignores_the_mask)
    assert not CachedModel(tiny_model(), RaggedCache()).has_grouped_heads


@pytest.mark.parametrize("padded", [False, True])
@torch.inference_mode()
def test_one_token_needs_a_mask_only_where_a_prompt_is_padded(padded):
    """A mask without padding hides nothing, and with it attention takes twice as long."""
    model, masks = tiny_model(), []
    decoder = CachedModel(model, RaggedCache(), valid=torch.tensor([[not padded, True, True]]))
    model.register_forward_pre_hook(lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True)
    decoder.extend(torch.tensor([[2, 3, 4]]), [0])
    decoder.extend(torch.tensor([[5, 6]]), [3])
    decoder.extend(torch.tensor([[7]]), [5])
    assert masks[1] is not None and (masks[0] is None) == (masks[2] is None) != padded


@pytest.mark.parametrize("width", [8, 13])
def test_rows_of_masks_are_aligned(width):
    allowed = torch.ones(2, 3, width, dtype=torch.bool)
    for mask in (masks.additive(allowed, torch.float32), masks.for_groups(mask_of(3, width), 4)):
        assert mask.shape[-1] == width and all(stride % masks.ALIGNMENT == 0 for stride in mask.stride()[:-1])
