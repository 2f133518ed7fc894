"""Options that need a call of their own: constraints, ends, streamers, scores, caches; others are in `matrix.py`."""

import pytest
import torch
from transformers import (
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

import hf_ssd

from ..helpers.tiny import padded_batch

CONFIG = hf_ssd.SSDConfig(lookahead=4, budget=12)


def both(target, assistant, inputs, **options):
    """Returns the outputs of plain generate() and of SSD."""
    options = {"max_new_tokens": 30, "do_sample": False, **options}
    plain = target.generate(**inputs, **options)
    return plain, target.generate(**inputs, **options, assistant_model=assistant, ssd_config=CONFIG)


class StopsOnScore(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return (
            scores[-1].max(-1).values > scores[0].max(-1).values
            if len(scores) > 3
            else torch.zeros(len(input_ids)).bool()
        )


def test_criteria_that_look_at_scores(target, assistant):
    options = {"return_dict_in_generate": True, "output_scores": True}
    plain, ssd = both(
        target, assistant, padded_batch(1), stopping_criteria=StoppingCriteriaList([StopsOnScore()]), **options
    )
    assert torch.equal(plain.sequences, ssd.sequences)


def test_max_time(target, assistant):
    output = target.generate(
        **padded_batch(1),
        max_new_tokens=200,
        max_time=0.0,
        do_sample=False,
        assistant_model=assistant,
        ssd_config=CONFIG,
    )
    assert output.shape[1] == 9 + 1


def test_stop_strings(target, assistant, tokenizer):
    inputs = padded_batch(2)
    plain = target.generate(**inputs, max_new_tokens=30, do_sample=False)
    text = tokenizer.convert_ids_to_tokens(int(plain[0, 9 + 7]))
    plain, ssd = both(target, assistant, inputs, stop_strings=[text], tokenizer=tokenizer)
    assert torch.equal(plain, ssd)
    in_config = GenerationConfig(stop_strings=[text], max_new_tokens=30, do_sample=False, pad_token_id=0)
    again = target.generate(
        **inputs, generation_config=in_config, tokenizer=tokenizer, assistant_model=assistant, ssd_config=CONFIG
    )
    assert torch.equal(again, target.generate(**inputs, generation_config=in_config, tokenizer=tokenizer))
    assert in_config.stop_strings == [text]
    with pytest.raises(ValueError, match="pass `tokenizer=...`"):
        target.generate(**inputs, stop_strings=[text], assistant_model=assistant, ssd_config=CONFIG)


def test_the_streamer_of_transformers_that_another_thread_reads(target, assistant, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
    options = {"max_new_tokens": 20, "do_sample": False, "assistant_model": assistant, "ssd_config": CONFIG}
    output = target.generate(**padded_batch(1), **options, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(output[0, 9:])


@pytest.mark.parametrize("rows", [1, 4])
def test_scores_and_logits(target, assistant, rows):
    options = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.3,
        "eos_token_id": 50,
        "sequence_bias": [[[50], 1.0]],
    }
    plain, ssd = both(target, assistant, padded_batch(rows), **options)
    assert torch.equal(plain.sequences, ssd.sequences)
    assert len(plain.scores) == len(ssd.scores) == len(ssd.logits) == plain.sequences.shape[1] - 9
    for row in range(rows):
        ends = (plain.sequences[row, 9:] == 50).nonzero().flatten().tolist()
        for step in range(ends[0] + 1 if ends else len(plain.scores)):  # what follows belongs to padding
            for ours, theirs in ((ssd.scores, plain.scores), (ssd.logits, plain.logits)):
                assert ours[step].shape == theirs[step].shape and ours[step].dtype == theirs[step].dtype
                torch.testing.assert_close(ours[step][row], theirs[step][row], atol=1e-4, rtol=1e-4)


def test_output_type(target, assistant):
    plain, ssd = both(target, assistant, padded_batch(2), return_dict_in_generate=True)
    assert isinstance(ssd, type(plain)) and torch.equal(ssd["sequences"], plain.sequences)
    assert "hit rate" in str(ssd.ssd_stats) and ssd.ssd_stats.to_dict()["rounds"] == ssd.ssd_stats.rounds > 0
    assert all(len(record.accepted) == len(record.sources) == 2 for record in ssd.ssd_stats.records)
    assert both(target, assistant, padded_batch(2))[1].shape == plain.sequences.shape


def test_without_ssd_config_it_is_transformers_own(target, draft):
    from ..helpers.tiny import tiny_model

    plain, inputs = tiny_model(), padded_batch(1)
    assert type(target).__name__ == "LlamaForCausalLM" and hf_ssd.enable(target) is target
    assert torch.equal(target.generate(**inputs, max_new_tokens=9), plain.generate(**inputs, max_new_tokens=9))
    assisted = [m.generate(**inputs, max_new_tokens=9, do_sample=False, assistant_model=draft) for m in (target, plain)]
    assert torch.equal(*assisted)
    positional = [m.generate(inputs["input_ids"], GenerationConfig(max_new_tokens=5)) for m in (target, plain)]
    assert torch.equal(*positional)


def test_saving_an_enabled_model(target, tmp_path):
    from transformers import AutoModelForCausalLM

    target.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert torch.equal(loaded.lm_head.weight, target.lm_head.weight)
