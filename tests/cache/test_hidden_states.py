"""The hidden states that reach a draft are those of a plain forward pass over the text of each row."""

import pytest
import torch
from transformers import DynamicCache

import hf_ssd
from hf_ssd.cache import recurrent
from hf_ssd.cache.cache_name import CACHE
from hf_ssd.cache.hidden_states import HiddenStates, hooked_modules
from hf_ssd.cache.view import view_of
from hf_ssd.drafting.head_drafter import HeadPrefix
from hf_ssd.generation.target import Features

from ..helpers.families import sharp_model, tiny_config
from ..helpers.heads import LAYERS, knows, tiny_head
from ..helpers.tiny import FAMILIES, padded_batch, tiny_model

NEW = 24


def expected_features(model, text, layers=LAYERS):
    states = model(input_ids=text[None], use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in layers], dim=-1)


def features_of_a_call(model, monkeypatch, options=None, rows=3, inputs=None):
    """Returns the output, the features of each row that reached the head, and the records of the call."""
    inputs = inputs or padded_batch(rows)
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, **(options or {})}
    plain = model.generate(**inputs, **options).sequences
    kept = [mask.bool() for mask in inputs["attention_mask"]]
    prompt_length = inputs["input_ids"].shape[1]
    rows_of = lambda ids: [torch.cat([row[:prompt_length][k], row[prompt_length:]]) for row, k in zip(ids, kept)]  # noqa: E731
    knows(monkeypatch, [text.tolist() for text in rows_of(plain)])
    received = [[] for _ in plain]
    take = HeadPrefix.read_target

    def spying(self, states):
        counts = [n - 1 - known if more else 0 for n, known, more in zip(self.lengths, self.known, self.goes_on)]
        for row, of_row in enumerate(states.split(counts)):
            received[row].append(of_row)
        take(self, states)

    monkeypatch.setattr(HeadPrefix, "read_target", spying)
    config = hf_ssd.SSDConfig(lookahead=3, asynchronous=False, on_draft_failure="raise")
    output = model.generate(**inputs, **options, assistant_model=tiny_head(model), ssd_config=config)
    assert torch.equal(output.sequences, plain)
    return rows_of(output.sequences), [torch.cat(of_row) for of_row in received], output.ssd_stats


def check(model, texts, features, tolerance=1e-5):
    for text, of_row in zip(texts, features):
        expected = expected_features(model, text)[: len(of_row)]
        assert len(of_row) > len(text) // 2
        torch.testing.assert_close(of_row, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_features_of_rows_of_different_lengths_are_those_of_plain_passes(family, monkeypatch):
    model = hf_ssd.enable(tiny_model(family))
    texts, features, stats = features_of_a_call(model, monkeypatch)
    check(model, texts, features, 1e-4)
    assert stats.tokens_per_round > 1.5 and {len(r.accepted) for r in stats.records} == {3}


def test_rows_that_are_left_out_and_a_prefill_in_chunks(monkeypatch):
    model = hf_ssd.enable(tiny_model())
    plain = model.generate(**padded_batch(3), max_new_tokens=NEW, do_sample=False)
    end = int(plain[1, 14])
    texts, features, stats = features_of_a_call(
        model, monkeypatch, {"eos_token_id": end, "pad_token_id": 0, "prefill_chunk_size": 4}
    )
    assert any(-1 in record.accepted for record in stats.records)
    for text, of_row in zip(texts, features):
        expected = expected_features(model, text)[: len(of_row)]
        torch.testing.assert_close(of_row, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3_next", "bamba"])
def test_rows_that_are_fed_again_behind_a_recurrent_state(kind, monkeypatch):
    monkeypatch.setattr(recurrent, "WORTH_A_PASS", 6)
    model = sharp_model(tiny_config(kind))
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(0.3)
    layers = [1, 1, 2]
    monkeypatch.setattr("tests.helpers.heads.LAYERS", layers)
    inputs = padded_batch(3)
    inputs = {"input_ids": inputs["input_ids"][:, -1:], "attention_mask": inputs["attention_mask"][:, -1:]}
    model = hf_ssd.enable(model)
    texts, features, stats = features_of_a_call(model, monkeypatch, inputs=inputs)
    check(model, texts, features, 1e-4)
    assert stats.tokens_per_round > 1.5


def one_position_off(monkeypatch):
    between = Features.between
    shifted = lambda self, starts, ends: between(self, starts, ends).roll(1, dims=0)  # noqa: E731
    monkeypatch.setattr(Features, "between", shifted)


def rejected_tokens_kept(monkeypatch):
    add = Features.add

    def keeps(self, features, accepted):
        add(self, features, [k if k < 0 else features.shape[1] - 1 for k in accepted])
        self.lengths = [n - (features.shape[1] - 1 - k) if k >= 0 else n for n, k in zip(self.lengths, accepted)]
        self.values = self.values.roll(1, dims=1)

    monkeypatch.setattr(Features, "add", keeps)


@pytest.mark.parametrize("mutant", [one_position_off, rejected_tokens_kept])
def test_mistakes_are_noticed(mutant, monkeypatch):
    mutant(monkeypatch)
    model = hf_ssd.enable(tiny_model())
    texts, features, _ = features_of_a_call(model, monkeypatch)
    with pytest.raises(AssertionError):
        check(model, texts, features, 1e-4)


@torch.inference_mode()
def test_the_last_hidden_states_and_the_embedding_are_those_of_transformers():
    model, text = tiny_model("qwen3"), torch.arange(2, 12)
    view, _ = view_of(model, hooked=hooked_modules(model, [0, 3, 1]))
    captured = HiddenStates(view, [0, 3, 1])
    cache = DynamicCache(config=model.config)
    view(input_ids=text[None, :6], **{CACHE: cache})
    view(input_ids=text[None, 6:], **{CACHE: cache})
    states = captured.take()[0]
    torch.testing.assert_close(states, expected_features(model, text, [0, 3, 1]), atol=1e-5, rtol=1e-5)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()) or all(
        hook.__module__.startswith("transformers")
        for module in model.modules()
        for hook in module._forward_hooks.values()
    )


def test_layers_that_the_target_lacks_are_refused():
    with pytest.raises(ValueError, match="made for another target"):
        HiddenStates(tiny_model(), [1, 4])
