"""Attention for grouped heads without a copy of the keys and values, in passes of this package alone."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .. import devices
from ..devices import from_host
from . import masks
from .attached import attached_to
from .compiled import uncompiled
from .support import are_close, attention_layout, result_of
from .view import view_of

GROUPED = "hf_ssd_grouped"  # the implementation's name in transformers
MOST_QUERIES = 128  # with more queries, the repeated mask may be larger than repeated keys would be
THEIRS = ("position_bias", "softcap")  # arguments of layers that need more than masked attention

_of_thread = threading.local()  # `has_folded`: whether this thread has folded heads, for the trial
_obeys: "weakref.WeakKeyDictionary[PreTrainedModel, bool]" = weakref.WeakKeyDictionary()


def grouped_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """The `sdpa` attention of transformers, but heads of a group are queries of one head where that saves a copy."""
    # Queries are of shape (rows, heads, queries, head_dim).
    if len(query) > len(key):  # branches with a query each, which share the keys and values of their row
        branches = len(query) // len(key)
        of_rows = query.unflatten(0, (-1, branches)).squeeze(3).transpose(1, 2)
        mask = attention_mask.unflatten(0, (-1, branches)).squeeze(3).transpose(1, 2)
        output, _ = grouped_attention(module, of_rows, key, value, mask, dropout, scaling, **kwargs)
        return output.flatten(0, 1).unsqueeze(1), None
    (rows, heads, queries, head_dim), key_value_heads = query.shape, key.shape[1]
    if attention_mask is None:
        is_foldable = queries == 1
    else:
        is_foldable = queries <= MOST_QUERIES and attention_mask.shape[1] == 1
    if heads == key_value_heads or not is_foldable or any(kwargs.get(name) is not None for name in THEIRS):
        theirs = {"dropout": dropout, "scaling": scaling, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **theirs)
    if not torch.compiler.is_compiling():
        _of_thread.has_folded = True
    groups = heads // key_value_heads
    output = scaled_dot_product_attention(
        query.reshape(rows, key_value_heads, groups * queries, head_dim),
        key,
        value,
        attn_mask=None if attention_mask is None else masks.for_groups(attention_mask, groups),
        dropout_p=dropout,
        scale=scaling,
    )
    return output.reshape(rows, heads, queries, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


def use_grouped_heads(
    model: PreTrainedModel, configs: list[PreTrainedConfig], forwards: Mapping[nn.Module, Callable]
) -> None:
    """Lets a view of a model, whose configs these are, use [`grouped_attention`] in the layers that use `sdpa`."""
    # Sparse attention applies its indexer's choice only under the name `sdpa`; three tokens do not show that.
    if model.config.get_text_config(decoder=True)._attn_implementation != "sdpa" or attention_layout(model).indexed:
        return
    # Hooks may be made for the rows of a call, so a model that has hooks is tried when they are gone.
    if model not in _obeys and not attached_to(model).may_depend_on_rows:
        _obeys[model] = _is_obeyed_by(model, forwards)
    if _obeys.get(model):
        _name(configs)


def _name(configs: list[PreTrainedConfig]) -> None:
    for config in configs:
        if getattr(config, "_attn_implementation", None) == "sdpa":
            config._attn_implementation = {"": GROUPED}  # a string would be set in its sub-configs too


@torch.inference_mode()
def _is_obeyed_by(model: PreTrainedModel, forwards: Mapping[nn.Module, Callable]) -> bool:
    """Compares the logits of three tokens: a model may compute something else for a name that it does not know."""
    device, vocab_size = devices.of_model(model), model.config.get_text_config(decoder=True).vocab_size
    sees = from_host([[[True, False, False], [True, True, False], [True, False, True]]], device)
    inputs = {
        "input_ids": from_host([[token % vocab_size for token in (7, 11, 13)]], device),
        "position_ids": from_host([[0, 1, 1]], device),
        "attention_mask": masks.additive(sees, model.dtype),
        "use_cache": False,
    }
    (theirs, _), (ours, configs) = (view_of(model, forwards=forwards) for _ in range(2))
    _name(configs)
    _of_thread.has_folded = False
    with uncompiled(model):
        expected = result_of(theirs(**inputs))
        with contextlib.suppress(Exception):
            return are_close(result_of(ours(**inputs)), expected) and _of_thread.has_folded
    return False
