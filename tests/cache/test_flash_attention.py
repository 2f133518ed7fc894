"""A target with flash attention, of which a stand-in on the CPU computes what the kernel would."""

import contextlib

import pytest
import torch
from transformers import modeling_flash_attention_utils

from hf_ssd.cache.cached_model import CachedModel
from hf_ssd.cache.ragged import RaggedCache
from hf_ssd.cache.trial import check_supported

from ..helpers.tiny import VOCAB, tiny_model


def kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, **_):
    """Attention of one sequence, whose queries are the last of its columns: `(tokens, heads, head_dim)`."""
    assert cu_seqlens_q.tolist() == [0, len(q)] and cu_seqlens_k.tolist() == [0, len(k)]
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], dim=1) for one in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
    last = torch.arange(len(k) - len(q), len(k))[:, None]
    scores = scores.masked_fill(torch.arange(len(k)) > last, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def one_sequence(q, k, v, softmax_scale=None, **_):
    ends = [torch.tensor([0, one.shape[1]], dtype=torch.int32) for one in (q, k)]
    return kernel(q[0], k[0], v[0], *ends, softmax_scale)[None]


@pytest.fixture
def asked(monkeypatch):
    """How often transformers looks at positions to find out where sequences end, which waits for the device."""
    asked = []
    utils = modeling_flash_attention_utils
    process = lambda softmax_scale=None, **_: {"softmax_scale": softmax_scale}  # noqa: E731
    functions = (one_sequence, kernel, None, None, None), (process, process)
    monkeypatch.setattr(utils, "lazy_import_flash_attention", lambda *_, **__: functions)
    monkeypatch.setattr(utils, "_is_packed_sequence", lambda positions, _: bool(asked.append(positions.shape[-1])))
    return asked


@torch.inference_mode()
def verifications():
    """Returns the logits of two verifications behind a prefill, with flash attention and without."""
    generator = torch.Generator().manual_seed(0)
    prompt, *drafted = (torch.randint(2, VOCAB, (1, n), generator=generator) for n in (9, 4, 6))
    logits = []
    for implementation in ("flash_attention_2", "sdpa"):
        model = tiny_model()
        model.config._attn_implementation = implementation
        decoder = CachedModel(model, RaggedCache())
        decoder.extend(prompt, [0])
        logits.append([decoder.extend(drafted[0], [9]), decoder.extend(drafted[1], [11])])
    return logits


@pytest.mark.parametrize("is_told_lengths", [True, False])
def test_nothing_is_asked_of_positions(is_told_lengths, asked, monkeypatch):
    """The mutant, without lengths, asks in every layer."""
    if not is_told_lengths:
        monkeypatch.setattr(CachedModel, "_lengths_for_flash_attention", lambda self, count: {})
    torch.testing.assert_close(*verifications(), atol=1e-5, rtol=1e-5)
    assert asked == [n for n in (9, 4, 6) for _ in range(3) if not is_told_lengths]


def test_other_lengths_are_noticed(asked, monkeypatch):
    """The mutant: a column too many."""
    lengths = CachedModel._lengths_for_flash_attention
    monkeypatch.setattr(CachedModel, "_lengths_for_flash_attention", lambda self, count: lengths(self, count + 1))
    with pytest.raises(AssertionError):
        verifications()


@pytest.mark.parametrize("acts_on", [slice(None), slice(-1, None)])
def test_a_model_with_a_hook_is_tried_with_flash_attention_too(acts_on, asked):
    model = tiny_model()
    model.config._attn_implementation = "flash_attention_2"

    def add_one(module, inputs, output):
        output[:, acts_on] += 1.0
        return output

    model.model.layers[1].register_forward_hook(add_one)
    is_refused = pytest.raises(ValueError, match=r"forward hook `.*add_one` on `model.layers.1`")
    with contextlib.nullcontext() if acts_on == slice(None) else is_refused:
        check_supported(model, lookahead=4)
