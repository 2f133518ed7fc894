import json
import os
import threading

import pytest
import torch

import hf_ssd
from hf_ssd.distributed.launch import assistant_for
from hf_ssd.distributed.weights import SharedWeights, model_from_shared_weights

from ..helpers.tiny import FAMILIES, VOCAB, ready, tiny_draft, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_rebuilt_over_the_same_memory(family, tied):
    model = tiny_model(family, tie_word_embeddings=tied)
    tokens = torch.randint(2, VOCAB, (1, 8))
    with torch.inference_mode():
        expected = model(tokens).logits
    weights = SharedWeights(model)
    assert weights.fill() == 1 == weights.fill()
    other = model_from_shared_weights(json.loads(json.dumps(weights.description)))
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits, expected)
        assert torch.equal(other(tokens).logits, expected)
    assert type(other) is type(model)
    assert (other.lm_head.weight is other.get_input_embeddings().weight) == tied
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    assert weights.fill() == 2
    for ours, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(ours, theirs)
    weights.close()


def test_a_buffer_without_elements_is_not_taken_for_the_next_one():
    model = tiny_model()
    model.register_buffer("empty", torch.empty(0))
    weights = SharedWeights(model)
    weights.fill()
    other = model_from_shared_weights(weights.description)
    assert not other.empty.numel()
    assert torch.equal(other.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    weights.close()


def test_an_enabled_model_is_rebuilt_as_its_own_class():
    model = hf_ssd.enable(tiny_model())
    weights = SharedWeights(model)
    assert weights.description["model_class"] == "transformers.models.llama.modeling_llama:LlamaForCausalLM"
    weights.close()


def test_the_memory_has_no_name():
    before = set(os.listdir("/dev/shm"))
    weights = SharedWeights(tiny_model())
    weights.fill()
    assert set(os.listdir("/dev/shm")) == before
    weights.close()


def test_a_class_that_cannot_be_imported_is_refused():
    class Local(type(tiny_model())):
        pass

    model = tiny_model()
    model.__class__ = Local
    with pytest.raises(ValueError, match="save the draft with save_pretrained"):
        SharedWeights(model)


def test_the_first_call_does_not_copy_the_weights_of_its_draft(target, monkeypatch):
    """The thread that starts the worker does. A later call copies them only where they have changed."""
    threads, fill = [], SharedWeights.fill
    copied = lambda self, before: self.version > before and threads.append(threading.current_thread())  # noqa: E731
    monkeypatch.setattr(
        SharedWeights, "fill", lambda self: (before := self.version, fill(self), copied(self, before))[1]
    )
    draft = tiny_draft()
    inputs = {"input_ids": torch.tensor([[3, 5, 7]]), "max_new_tokens": 4, "assistant_model": draft}
    for _ in range(2):
        target.generate(**inputs, ssd_config=hf_ssd.SSDConfig(lookahead=2, budget=2))
        ready(assistant_for(draft))
    assert len(threads) == 1 and threads[0] is not threading.main_thread()
    with torch.no_grad():
        draft.lm_head.weight.mul_(2)
    target.generate(**inputs, ssd_config=hf_ssd.SSDConfig(lookahead=2, budget=2))
    assert threads[1:] == [threading.main_thread()]
