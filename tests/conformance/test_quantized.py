"""Targets and drafts whose weights are in 4 bits."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

import hf_ssd

from ..helpers.comparing import as_plain
from ..helpers.families import sharp_model
from ..helpers.tiny import padded_batch

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
SIZES = {"vocab_size": 97, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None, "pad_token_id": 0}
IN_4_BITS = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in float32. Layers of widths that are no multiple of 64 do not run on a CPU in 4 bits."""
    path = tmp_path_factory.mktemp("model")
    sharp_model(LlamaConfig(**SIZES)).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def target(folder):
    options = {"quantization_config": IN_4_BITS, "dtype": torch.float32, "device_map": "cpu"}
    return hf_ssd.enable(AutoModelForCausalLM.from_pretrained(folder, **options))


def test_a_target_in_4_bits_has_its_own_tokens_and_a_draft_in_32(target, folder):
    draft = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output, plain = as_plain(target, draft, padded_batch(3))
    assert not torch.equal(draft.generate(**padded_batch(3), max_new_tokens=30, do_sample=False), plain.sequences)
    assert output.ssd_stats.tokens_per_round > 1.2


def test_a_draft_in_4_bits_is_loaded_by_its_worker(target, folder):
    with hf_ssd.launch_draft(folder, device="cpu", num_threads=1, quantization_config=IN_4_BITS) as assistant:
        assert as_plain(target, assistant, padded_batch(3))[0].ssd_stats.hit_rate > 0.5
