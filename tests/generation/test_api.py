"""An enabled model is copied, pickled and saved like any other."""

import copy
import io
import pickle

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_ssd
from hf_ssd.distributed.launch import assistant_for

from ..helpers.tiny import padded_batch, ready, speculated, tiny_draft, tiny_model

CONFIG = hf_ssd.SSDConfig(lookahead=3, budget=8, asynchronous=False)


def through_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "torch.save": through_torch,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "an old pickle": lambda model: pickle.loads(pickle.dumps(model, 0)),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_and_pickles_of_an_enabled_model_are_enabled(name, draft):
    model, inputs = hf_ssd.enable(tiny_model()), padded_batch(2)
    options = {"max_new_tokens": 10, "assistant_model": draft, "ssd_config": CONFIG}
    expected = model.generate(**inputs, **options)
    twin = COPIES[name](model)
    assert type(twin) is type(model) and twin is not model and type(model).__name__ == "LlamaForCausalLM"
    assert torch.equal(twin.generate(**inputs, **options), expected)
    assert torch.equal(twin.generate(**inputs, max_new_tokens=10), expected)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))
    assert b"transformers.models.llama.modeling_llama" in pickle.dumps(model)


class OfOnesOwn(hf_ssd.SSDGenerationMixin, LlamaForCausalLM):
    pass


class AnotherOne(OfOnesOwn):
    pass


@pytest.mark.parametrize("kind", [OfOnesOwn, AnotherOne])
def test_a_class_of_ones_own_with_the_mixin_pickles_by_its_name(kind):
    model = kind(tiny_model().config).eval()
    assert hf_ssd.enable(model) is model and type(pickle.loads(pickle.dumps(model))) is kind


def test_a_draft_is_copied_after_its_weights_are_shared():
    """They are in memory that the worker maps, which the copy leaves alone."""
    target, draft = hf_ssd.enable(tiny_model()), hf_ssd.enable(tiny_draft())
    ready(assistant_for(draft))
    settings, accepted = {"asynchronous": True}, []
    accepted.append(speculated(target, draft, settings=settings).ssd_stats.column("accepted"))
    twin = copy.deepcopy(draft)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    accepted.append(speculated(target, draft, settings=settings).ssd_stats.column("accepted"))
    assert accepted[0] == accepted[1] and max(map(max, accepted[0])) > 0
