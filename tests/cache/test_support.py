import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    XLMConfig,
    XLMWithLMHeadModel,
)

from hf_ssd.cache import trial
from hf_ssd.cache.trial import check_supported

from ..helpers.tiny import tiny_model


def test_a_model_is_tried_once_for_each_attention_and_dtype(monkeypatch):
    tried, try_it = [], trial._try
    monkeypatch.setattr(trial, "_try", lambda model, *_: tried.append(model.dtype) or try_it(model, *_))
    model = tiny_model()
    for change in (lambda: None, lambda: model.set_attn_implementation("eager"), model.double, lambda: None):
        change()
        check_supported(model)
    assert tried == [torch.float32, torch.float32, torch.float64]


def test_models_that_take_no_4d_masks_are_refused():
    with pytest.raises(ValueError, match="BloomForCausalLM does not"):
        check_supported(BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=40)).eval())
    with pytest.raises(ValueError, match="XLMWithLMHeadModel does not take .* keeps no keys and values"):
        check_supported(XLMWithLMHeadModel(XLMConfig(emb_dim=16, n_layers=1, n_heads=2, vocab_size=40)).eval())


def test_a_model_that_ignores_the_mask_is_refused():
    class Deaf(type(tiny_model())):
        def forward(self, *args, attention_mask=None, **kwargs):
            return super().forward(*args, **kwargs)

    model = tiny_model()
    model.__class__ = Deaf
    with pytest.raises(ValueError, match="does not (obey|take) a 4D attention mask"):
        check_supported(model)
    assert isinstance(model.lm_head, torch.nn.Linear)
