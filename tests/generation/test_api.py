"""An enabled model is copied, pickled and saved like any other."""

import copy
import io
import pickle
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_ssd
from hf_ssd.distributed.launch import assistant_for

from ..helpers.tiny import padded_batch, ready, tiny_draft, tiny_model

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
    **{
        f"pickle {protocol}": lambda model, protocol=protocol: pickle.loads(pickle.dumps(model, protocol))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_and_pickles_of_an_enabled_model_are_enabled(name, draft):
    model, inputs = hf_ssd.enable(tiny_model()), padded_batch(2)
    options = {"max_new_tokens": 10, "assistant_model": draft, "ssd_config": CONFIG}
    expected = model.generate(**inputs, **options)
    twin = COPIES[name](model)
    assert type(twin) is type(model) and twin is not model
    assert torch.equal(twin.generate(**inputs, **options), expected)
    assert torch.equal(twin.generate(**inputs, max_new_tokens=10), expected)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))


def test_a_pickle_names_the_class_of_the_model_itself():
    model = hf_ssd.enable(tiny_model())
    assert type(model).__name__ == "LlamaForCausalLM"
    assert b"transformers.models.llama.modeling_llama" in pickle.dumps(model)
    assert type(hf_ssd.enable(tiny_model(seed=1))) is type(model)


def test_a_class_of_ones_own_with_the_mixin_pickles_by_its_name():
    for kind in (OfOnesOwn, AnotherOne):
        model = kind(tiny_model().config).eval()
        assert hf_ssd.enable(model) is model
        assert type(pickle.loads(pickle.dumps(model))) is kind


class OfOnesOwn(hf_ssd.SSDGenerationMixin, LlamaForCausalLM):
    pass


class AnotherOne(OfOnesOwn):
    pass


def test_a_draft_is_copied_after_its_weights_are_shared():
    """They are in memory that the worker maps, which the copy leaves alone."""
    target, draft, inputs = hf_ssd.enable(tiny_model()), hf_ssd.enable(tiny_draft()), padded_batch(1)
    config = hf_ssd.SSDConfig(lookahead=3, budget=8)
    options = {"max_new_tokens": 10, "ssd_config": config, "return_dict_in_generate": True}
    ready(assistant_for(draft))
    expected = target.generate(**inputs, assistant_model=draft, **options)
    twin = copy.deepcopy(draft)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    output = target.generate(**inputs, assistant_model=draft, **options)
    assert output.ssd_stats.column("accepted") == expected.ssd_stats.column("accepted")
    assert output.ssd_stats.draft_failure is None and max(map(max, output.ssd_stats.column("accepted"))) > 0


class Wrapper(torch.nn.Module):
    """What is known here of a `PeftModel`."""

    def __init__(self, model, is_prompt_learning=False):
        super().__init__()
        self.model, self.active_peft_config = model, SimpleNamespace(is_prompt_learning=is_prompt_learning)

    def get_base_model(self):
        return self.model

    def generate(self, **arguments):
        return self.model.generate(**arguments)


def test_the_model_in_a_peft_model_takes_part(draft):
    inputs, options = padded_batch(2), {"max_new_tokens": 10, "do_sample": False}
    plain = tiny_model().generate(**inputs, **options)
    options |= {"assistant_model": Wrapper(draft), "ssd_config": CONFIG, "return_dict_in_generate": True}
    target = Wrapper(tiny_model())
    by_function = hf_ssd.generate(target, **inputs, **options)
    assert hf_ssd.enable(target) is target
    for output in (by_function, target.generate(**inputs, **options)):
        assert torch.equal(output.sequences, plain) and output.ssd_stats.acceptance_rate > 0
    with pytest.raises(ValueError, match="Prompt and prefix tuning"):
        hf_ssd.enable(Wrapper(tiny_model(), is_prompt_learning=True))
