"""The cache that a call returns: a later turn goes on from it as from that of plain generate()."""

import pytest
import torch

import hf_ssd
from hf_ssd.cache.cache_name import CACHE
from hf_ssd.cache.cached_model import CachedModel

from ..helpers.families import sharp_model, tiny_config
from ..helpers.preparing import preparing
from ..helpers.tiny import VOCAB, padded_batch, tiny_draft, tiny_model

CONFIG = hf_ssd.SSDConfig(lookahead=4, budget=12, asynchronous=False)
WANTED = {"do_sample": False, "return_dict_in_generate": True}


def turns(target, options, of_turn, mask_of_pads, padded, count=3):
    """Plays several turns with one cache: the output of each, and whether rows have ended unevenly."""
    inputs = padded_batch(4) if padded else {"input_ids": padded_batch(4)["input_ids"].clamp(min=2)}
    ids, mask = inputs["input_ids"], inputs.get("attention_mask", torch.ones(4, 9, dtype=torch.long))
    cache, outputs, uneven = None, [], False
    for turn in range(count):
        output = target.generate(ids, attention_mask=mask, **{CACHE: cache}, **WANTED, **options, **of_turn(turn))
        new = output.sequences[:, ids.shape[1] :]
        lengths = (new != 0).sum(1)
        uneven |= len(set(lengths.tolist())) > 1
        question = torch.randint(2, VOCAB, (4, 5), generator=torch.Generator().manual_seed(turn))
        of_answer = torch.ones_like(new) if mask_of_pads else (new != 0).long()
        mask = torch.cat([mask, of_answer, torch.ones_like(question)], dim=1)
        ids, cache = torch.cat([output.sequences, question], dim=1), output[CACHE]
        assert cache.get_seq_length() == output.sequences.shape[1] - 1
        outputs.append(output.sequences)
    return outputs, uneven


def stops(target, kind, tokenizer):
    """Options with which rows end at different places."""
    plain = target.generate(**padded_batch(4), max_new_tokens=30, do_sample=False)
    tokens = [int(plain[0, 9 + 3]), int(plain[1, 9 + 8]), int(plain[2, 9 + 12])]
    if kind == "eos":
        return {"eos_token_id": tokens, "max_new_tokens": 24}
    if kind == "string":
        strings = tokenizer.convert_ids_to_tokens([token for token in tokens if token > 1])
        return {"stop_strings": strings, "tokenizer": tokenizer, "eos_token_id": tokens[:1], "max_new_tokens": 24}
    return {"eos_token_id": tokens[:1], "max_new_tokens": 9}


def differences(target, draft, options, mask_of_pads, padded):
    """The turns in which speculation, in this turn and those before, and plain generation differ."""
    ssd = {"assistant_model": draft, "ssd_config": CONFIG}
    expected, uneven = turns(target, options, lambda _: {}, mask_of_pads, padded)
    assert uneven
    mixed = [lambda _: ssd, lambda turn: ssd if turn == 0 else {}, lambda turn: {} if turn == 0 else ssd]
    with preparing():
        outputs = [turns(target, options, of_turn, mask_of_pads, padded)[0] for of_turn in mixed]
    return [i for of_one in outputs for i, both in enumerate(zip(of_one, expected)) if not torch.equal(*both)]


@pytest.mark.parametrize(
    "kind, mask_of_pads, padded",
    [("eos", True, False), ("string", True, True), ("length", False, False)],
)
def test_later_turns_are_those_of_plain_generation(target, draft, tokenizer, kind, mask_of_pads, padded):
    assert not differences(target, draft, stops(target, kind, tokenizer), mask_of_pads, padded)


def test_later_turns_with_a_sliding_window():
    target, draft = hf_ssd.enable(tiny_model("gemma")), tiny_draft("gemma")
    assert not differences(target, draft, stops(target, "eos", None), mask_of_pads=True, padded=True)


@pytest.mark.slow
def test_later_turns_with_sparse_attention():
    """The cache also holds the keys by which columns are chosen."""
    config = tiny_config("deepseek_v32")
    target, draft = hf_ssd.enable(sharp_model(config)), sharp_model(config, noise=0.02)
    assert not differences(target, draft, stops(target, "eos", None), mask_of_pads=True, padded=True)


def test_the_columns_are_those_of_plain_generation(target, draft):
    options = {**padded_batch(4), **stops(target, "eos", None), **WANTED}
    plain = target.generate(**options)[CACHE]
    ssd = target.generate(**options, assistant_model=draft, ssd_config=CONFIG)[CACHE]
    for ours, theirs in zip(ssd.layers, plain.layers):
        seen = options["attention_mask"].bool()[:, None, :, None]
        for one, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            torch.testing.assert_close(one[:, :, 9:], other[:, :, 9:], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(one[:, :, :9] * seen, other[:, :, :9] * seen, atol=1e-4, rtol=1e-4)


def test_columns_that_are_missing_are_noticed(target, draft, monkeypatch):
    """The mutant: the cache is returned as the rounds have left it."""
    monkeypatch.setattr(CachedModel, "finish", lambda *_: None)
    assert differences(target, draft, stops(target, "eos", None), mask_of_pads=True, padded=True)


def test_a_user_who_gets_no_cache_pays_for_none(target, draft, monkeypatch):
    def not_needed(*_):
        raise AssertionError("fed for no one")

    monkeypatch.setattr(CachedModel, "finish", not_needed)
    options = {**padded_batch(4), **stops(target, "eos", None), "do_sample": False}
    target.generate(**options, assistant_model=draft, ssd_config=CONFIG)
