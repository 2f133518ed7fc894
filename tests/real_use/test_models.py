"""Models that real use brings: some are refused in a sentence, others have limits of their own."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoConfig, GPTNeoForCausalLM

import hf_ssd
from hf_ssd.generation import draft as draft_of_a_call

from ..conftest import padded_batch, tiny_draft, tiny_model

IN_TURN = hf_ssd.SSDConfig(lookahead=3, asynchronous=False)
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
ENDS = {"bos_token_id": None, "eos_token_id": None}


def gpt_neo():
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 97, "max_position_embeddings": 256}
    config = GPTNeoConfig(attention_types=[[["global", "local"], 1]], window_size=8, **sizes, **ENDS)
    return GPTNeoForCausalLM(config).eval()


def gpt2(positions):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=97, n_positions=positions, **ENDS)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.transformer.wpe.weight[:] = 0.0
    return model


def test_a_model_that_cuts_windows_by_the_columns_of_its_cache_is_refused():
    with pytest.raises(ValueError, match="makes a mask of its own from the number of columns in its cache"):
        hf_ssd.enable(gpt_neo()).generate(
            torch.randint(1, 97, (2, 4)), **GREEDY, max_new_tokens=30, assistant_model=gpt_neo(), ssd_config=IN_TURN
        )


def test_gradient_checkpointing_left_on_is_refused_with_what_to_call():
    target = hf_ssd.enable(tiny_model())
    target.gradient_checkpointing_enable()
    target.train()
    with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
        target.generate(**padded_batch(), **GREEDY, assistant_model=tiny_draft(), ssd_config=IN_TURN)


@pytest.mark.parametrize("is_target", [True, False], ids=["target", "draft"])
def test_a_dynamically_quantized_model_drafts_and_is_no_target(is_target):
    quantized = torch.ao.quantization.quantize_dynamic(tiny_model(), {torch.nn.Linear}, dtype=torch.qint8)
    target, draft = (quantized, tiny_draft()) if is_target else (tiny_model(), quantized)
    options = {**padded_batch(), **GREEDY, "max_new_tokens": 12}
    if is_target:
        with pytest.raises(ValueError, match="depend on the other tokens and rows"):
            hf_ssd.enable(target).generate(**options, assistant_model=draft, ssd_config=IN_TURN)
    else:
        output = hf_ssd.enable(target).generate(**options, assistant_model=draft, ssd_config=IN_TURN)
        assert torch.equal(output, target.generate(**options))


@pytest.mark.parametrize("place", ["in turn", "ahead"])
def test_a_draft_with_fewer_positions_drafts_up_to_its_limit(place, monkeypatch):
    target, draft = hf_ssd.enable(gpt2(256)), gpt2(32)
    options = {"inputs": torch.randint(1, 97, (1, 10)), **GREEDY, "max_new_tokens": 60}
    config = IN_TURN if place == "in turn" else hf_ssd.SSDConfig(lookahead=3)
    drafts = hf_ssd.launch_draft(draft) if place == "ahead" else draft
    said = []
    monkeypatch.setattr(draft_of_a_call.logger, "warning_once", said.append)
    try:
        output = target.generate(**options, assistant_model=drafts, ssd_config=config, return_dict_in_generate=True)
    finally:
        if place == "ahead":
            drafts.close()
    stats = output.ssd_stats
    assert stats.draft_failure is None
    assert torch.equal(output.sequences, target.generate(**options))
    drafted = [record.lookahead for record in stats.records]
    assert drafted[0] == 3 and not any(drafted[-30:])
    assert set(said) == {"The draft has 32 positions; what is longer is decoded plainly."}
