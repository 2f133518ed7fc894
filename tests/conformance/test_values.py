"""What a call is given may be of any kind: another default dtype, numbers of numpy, tensors; and it stays as it was."""

import copy

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

import hf_ssd
from hf_ssd.noise import Noise

from ..helpers.tiny import padded_batch

CONFIG = hf_ssd.SSDConfig(lookahead=4, budget=12)
IN_TURN = hf_ssd.SSDConfig(lookahead=4, budget=12, asynchronous=False)


# ---------------------------------------------------------------- the default dtype


def with_default(dtype, target, assistant, config, **options):
    torch.manual_seed(7)
    torch.set_default_dtype(dtype)
    try:
        output = target.generate(
            **padded_batch(4),
            max_new_tokens=30,
            assistant_model=assistant,
            ssd_config=config,
            return_dict_in_generate=True,
            **options,
        )
    finally:
        torch.set_default_dtype(torch.float32)
    stats = output.ssd_stats
    assert stats.draft_failure is None and stats.tokens_per_round > 1.1
    return output.sequences


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_makes_no_difference(target, assistant, draft, dtype):
    """Greedy calls are in `test_against_plain.py`."""
    options = {"do_sample": True, "top_k": 5}
    for model, config in ((assistant, CONFIG), (draft, IN_TURN)):
        expected = with_default(torch.float32, target, model, config, **options)
        assert torch.equal(with_default(dtype, target, model, config, **options), expected)


def test_random_numbers_of_the_default_dtype_are_noticed(target, draft, monkeypatch):
    """The mutant: random numbers are of whatever dtype is the default."""
    options, uniform = {"do_sample": True, "top_k": 5}, Noise._uniform
    expected = with_default(torch.float32, target, draft, IN_TURN, **options)
    monkeypatch.setattr(Noise, "_uniform", lambda *places: uniform(*places).to(torch.get_default_dtype()))
    assert not torch.equal(with_default(torch.bfloat16, target, draft, IN_TURN, **options), expected)


# ---------------------------------------------------------------- inputs are left alone


def right_padded():
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[1, 6:] = False
    mask[2, 8:] = False
    return {"input_ids": padded_batch(3)["input_ids"].clamp(min=2), "attention_mask": mask}


def given_and_left(target, draft):
    """Returns what a call was given, as it was before and as it is after."""
    given = {
        **right_padded(),
        "position_ids": torch.arange(9).repeat(3, 1),
        "generation_config": GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=50, pad_token_id=0),
        "logits_processor": LogitsProcessorList(),
        "stopping_criteria": StoppingCriteriaList(),
    }
    before = copy.deepcopy(given)
    target.generate(**given, assistant_model=draft, ssd_config=IN_TURN)
    return before, given


def test_inputs_are_never_written_to(target, draft):
    before, after = given_and_left(target, draft)
    for name, value in before.items():
        same = torch.equal(value, after[name]) if isinstance(value, torch.Tensor) else value == after[name]
        assert same, name


def test_a_mask_with_padding_behind_the_prompt_is_that_of_plain_generation(target, draft):
    options = {"max_new_tokens": 20, "do_sample": False}
    plain = target.generate(**right_padded(), **options)
    ssd = target.generate(**right_padded(), **options, assistant_model=draft, ssd_config=IN_TURN)
    assert torch.equal(plain, ssd)
