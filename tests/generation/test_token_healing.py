"""`token_healing` chooses the last token of a prompt anew, as plain generation does."""

import pytest
import torch
from transformers import GenerationConfig

import hf_ssd
from hf_ssd.generation import api

from ..helpers.tiny import tiny_model
from ..helpers.vocabularies import byte_level

IN_TURN = hf_ssd.SSDConfig(lookahead=3, budget=4, asynchronous=False)
PROMPTS = ["the quick dogt", "a dog jumps overt"]  # whose last token also begins longer ones


def healing_pair():
    """A tokenizer, a target that completes words differently from how their beginnings are written, and its draft."""
    tokenizer = byte_level()
    tokenizer.padding_side = "left"
    tokenizer.add_special_tokens({"pad_token": "<pad>", "bos_token": "<s>"})
    changes = {"vocab_size": len(tokenizer), "eos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    models = tiny_model(**changes), tiny_model(**changes)
    for model in models:
        model.lm_head.weight.data *= 20  # differences that outweigh the preference for the last token as it is
        model.lm_head.weight.data[tokenizer.get_vocab()["t"]] = 0.0
    return tokenizer, hf_ssd.enable(models[0]), models[1]


def options_of(tokenizer, prompts: list[str]) -> dict:
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    options = {"token_healing": True, "tokenizer": tokenizer, "max_new_tokens": 16, "do_sample": False}
    return {**inputs, **options}


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["a row", "two rows"])
@pytest.mark.parametrize("place", ["the call", "its config"])
def test_token_healing_gives_plain_generations_tokens(prompts, place):
    tokenizer, target, draft = healing_pair()
    options = options_of(tokenizer, prompts)
    if place == "its config":
        changes = {name: options.pop(name) for name in ("token_healing", "max_new_tokens", "do_sample")}
        options["generation_config"] = GenerationConfig(**changes, pad_token_id=tokenizer.pad_token_id)
    plain = target.generate(**options)
    output = target.generate(**options, assistant_model=draft, ssd_config=IN_TURN, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    length = options["input_ids"].shape[1]
    assert (output.sequences[:, length - 1] != options["input_ids"][:, -1]).all()  # every row was healed
    assert output.ssd_stats.tokens_per_round > 2


def test_the_draft_of_an_enabled_model_has_no_part_in_healing(monkeypatch):
    tokenizer, target, draft = healing_pair()
    options, calls, check = options_of(tokenizer, PROMPTS), [], api.check_arguments
    plain = target.generate(**options)
    hf_ssd.enable(target, draft, IN_TURN)
    monkeypatch.setattr(api, "check_arguments", lambda *given: calls.append(given) or check(*given))
    assert torch.equal(target.generate(**options), plain) and len(calls) == 1
    assert torch.equal(target.generate(**options, ssd_config=None), plain) and len(calls) == 1


def test_what_healing_needs_is_named():
    tokenizer, target, draft = healing_pair()
    options = options_of(tokenizer, PROMPTS) | {"assistant_model": draft, "ssd_config": IN_TURN}
    with pytest.raises(ValueError, match="you must pass the model's tokenizer"):
        target.generate(**options | {"tokenizer": None})
    hf_ssd.disable(target)
    with pytest.raises(ValueError, match=r"`token_healing` needs a model that was passed to hf_ssd.enable\(\)"):
        hf_ssd.generate(target, **options)
