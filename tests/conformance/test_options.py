"""What a call takes and gives beside tokens: streamers, outputs, random numbers."""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

import hf_ssd
from hf_ssd.distributed.sessions import WorkerSession
from hf_ssd.distributed.several_drafts import SeveralDrafts
from hf_ssd.noise import Noise
from hf_ssd.rounds import CUSTOM, PREPARED

from ..helpers.comparing import GREEDY, as_plain, generate, settings
from ..helpers.last_token import LastToken
from ..helpers.suites import quick_first
from ..helpers.tiny import VOCAB, padded_batch, tiny_model
from ..matrix import RETURNED
from .test_against_plain import default_dtype
from .test_families import Knows

# ---------------------------------------------------------------- what comes back


def test_the_streamer_of_transformers_that_another_thread_reads(target, assistant, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
    output = generate(target, assistant, padded_batch(1), streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(output.sequences[0, 9:])


def test_output_type(target, assistant):
    ssd, plain = as_plain(target, assistant, padded_batch(2))
    assert isinstance(ssd, type(plain)) and torch.equal(ssd["sequences"], plain.sequences)
    assert "hit rate" in str(ssd.ssd_stats) and ssd.ssd_stats.to_dict()["rounds"] == ssd.ssd_stats.rounds > 0
    assert all(len(record.accepted) == len(record.sources) == 2 for record in ssd.ssd_stats.records)
    options = {**GREEDY, "return_dict_in_generate": False, **settings(assistant)}
    assert torch.equal(target.generate(**padded_batch(2), **options), plain.sequences)


def test_without_ssd_config_it_is_transformers_own(target, draft, tmp_path):
    plain, inputs = tiny_model(), padded_batch(1)
    assert type(target).__name__ == "LlamaForCausalLM" and hf_ssd.enable(target) is target
    for model in ({}, {"assistant_model": draft}):
        texts = [one.generate(**inputs, max_new_tokens=9, do_sample=False, **model) for one in (target, plain)]
        assert torch.equal(*texts)
    assert torch.equal(*[m.generate(inputs["input_ids"], GenerationConfig(max_new_tokens=5)) for m in (target, plain)])
    target.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert torch.equal(loaded.lm_head.weight, target.lm_head.weight)


# ---------------------------------------------------------------- what is given


def test_inputs_are_never_written_to(target, draft, tokenizer):
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[1, 6:] = False
    given = {
        "input_ids": padded_batch(3)["input_ids"].clamp(min=2),
        "attention_mask": mask,
        "position_ids": torch.arange(9).repeat(3, 1),
        "generation_config": GenerationConfig(max_new_tokens=20, eos_token_id=50, pad_token_id=0, stop_strings=["x"]),
        "logits_processor": LogitsProcessorList(),
        "stopping_criteria": StoppingCriteriaList(),
    }
    before = copy.deepcopy(given)
    target.generate(**given, tokenizer=tokenizer, **settings(draft))
    for name, value in before.items():
        assert torch.equal(value, given[name]) if isinstance(value, torch.Tensor) else value == given[name], name


@pytest.mark.parametrize("option", [{"encoder_repetition_penalty": 1.3}, {"encoder_no_repeat_ngram_size": 2}], ids=str)
def test_nothing_is_said_of_processors_that_the_target_applies(target, draft, option):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(target, draft, padded_batch(2), **option)


@pytest.mark.parametrize("returned", ["half", "with a gradient"])
def test_sampled_tokens_are_possible_whatever_type_a_processor_returns(target, draft, returned):
    only = torch.full((VOCAB,), -torch.inf).index_fill(0, torch.tensor([7, 23, 41]), 0.0)
    processors = [RETURNED[returned], lambda ids, scores: scores + only.to(scores.dtype)]
    output = generate(target, draft, padded_batch(2), do_sample=True, logits_processor=processors)
    assert {7, 23, 41}.issuperset(output.sequences[:, 9:].flatten().tolist())


def test_a_fallback_that_proposes_nonsense_is_named_and_the_next_call_works(target, assistant):
    class Nonsense:
        def propose(self, input_ids, lookahead):
            return torch.full((1, 2), VOCAB + 5), None

    with pytest.raises(ValueError, match="Nonsense"):
        generate(target, assistant, padded_batch(2), {"fallback": Nonsense()})
    process = assistant.workers[0].process.popen.pid
    generate(target, assistant, padded_batch(2))
    assert assistant.workers[0].process.popen.pid == process


def test_a_fallback_of_ones_own_is_asked_for_rows_that_missed_alone(target, assistant):
    proposer = LastToken()
    stats = generate(target, assistant, padded_batch(4), {"fallback": proposer}, max_new_tokens=40).ssd_stats
    misses = sum(not record.hits[row] for record in stats.records for row in record.live)
    assert 0 < proposer.asked <= misses + 4  # the last outcome of a row may be a miss that is not verified any more


def check_told(target, assistant):
    """
    A draft that is the target, beside a fallback that is often right: whatever of the fallback's tokens was accepted,
    outcomes behind them are prepared, and all that the draft proposes afterwards is right.
    """
    inputs, tokens = padded_batch(3), 100
    plain = target.generate(**inputs, **{**GREEDY, "max_new_tokens": tokens})
    fallback = Knows(plain.sequences, inputs["attention_mask"])
    of_config = {"budget": 24, "fan_out": [0, 8, 8, 8, 0], "fallback": fallback}  # its own last outcome is a miss
    records = as_plain(target, assistant, inputs, of_config, max_new_tokens=tokens)[0].ssd_stats.records
    behind = [
        two.accepted[row]
        for one, two in zip(records, records[1:-2])  # the last ones are cut where the text ends
        for row in two.live
        if one.sources[row] == CUSTOM and one.accepted[row] and two.sources[row] == PREPARED
    ]
    assert len(behind) > 2 and {*behind} == {4}


@pytest.mark.slow
@pytest.mark.parametrize("workers, session", [(1, WorkerSession), (2, SeveralDrafts)])
def test_the_draft_reads_what_a_fallback_proposed(target, workers, session, monkeypatch):
    with hf_ssd.launch_draft(tiny_model(), devices=["cpu"] * workers, num_threads=1) as assistant:
        check_told(target, assistant)
        monkeypatch.setattr(session, "send_proposals", lambda *_: None)  # the mutant
        with pytest.raises(AssertionError):
            check_told(target, assistant)


# ---------------------------------------------------------------- random numbers


def random_states():
    python, (kind, numbers, *rest) = random.getstate(), np.random.get_state()
    return python, torch.get_rng_state().tolist(), (kind, numbers.tolist(), *rest)


@pytest.mark.parametrize("of_config", [{}, {"fallback": "random", "lookahead": 3}], ids=str)
@pytest.mark.parametrize("is_ahead", [False, True])
def test_greedy_calls_leave_the_random_numbers_alone_as_plain_ones_do(target, draft, assistant, is_ahead, of_config):
    model, before = assistant if is_ahead else draft, random_states()
    generate(target, model, padded_batch(2), of_config)
    assert random_states() == before
    generate(target, model, padded_batch(2), of_config, do_sample=True)  # which draws from torch's generator
    after = random_states()
    assert after[1] != before[1] and (after[0], after[2]) == (before[0], before[2])


@pytest.mark.parametrize(
    "fallback", quick_first(["random", "ngram", LastToken()]), ids=["random", "ngram", "an object"]
)
def test_a_seed_repeats_a_call_with_fixed_settings_whatever_the_fallback(target, assistant, fallback):
    texts, sources = [], set()
    options = {"do_sample": True, "temperature": 0.7, "max_new_tokens": 24}
    for number in range(3):
        torch.manual_seed(11)
        output = generate(target, assistant, padded_batch(2), {"budget": 6, "fallback": fallback}, **options)
        sources.update(*output.ssd_stats.column("sources"))
        texts.append(output.sequences.tolist())
        if number % 2:  # another call between, from which the cache shape could learn
            generate(target, assistant, padded_batch(2, seed=number), {"budget": 6}, **options)
    assert all(text == texts[0] for text in texts) and sources & {"ngram", "random", "custom"}


def with_default(dtype, target, draft):
    torch.manual_seed(7)
    with default_dtype(dtype):
        output = generate(target, draft, padded_batch(4), do_sample=True, top_k=5)
    assert output.ssd_stats.tokens_per_round > 1.1
    return output.sequences


@pytest.mark.parametrize("dtype", quick_first([torch.float64, torch.bfloat16]))
def test_the_default_dtype_makes_no_difference(target, assistant, draft, dtype):
    """Greedy calls are in `test_against_plain.py`."""
    for model in (assistant, draft):
        assert torch.equal(with_default(dtype, target, model), with_default(torch.float32, target, model))


def test_random_numbers_of_the_default_dtype_are_noticed(target, draft, monkeypatch):
    """The mutant: random numbers are of whatever dtype is the default."""
    expected, uniform = with_default(torch.float32, target, draft), Noise._uniform
    monkeypatch.setattr(Noise, "_uniform", lambda *places: uniform(*places).to(torch.get_default_dtype()))
    assert not torch.equal(with_default(torch.bfloat16, target, draft), expected)


@pytest.mark.slow
def test_saguaro_sampling_trades_acceptance_for_hits(target, assistant):
    torch.manual_seed(3)
    options = {"do_sample": True, "top_k": 20, "max_new_tokens": 120}
    few, many = (
        generate(target, assistant, padded_batch(8), {"saguaro_c": c, "fan_out": "geometric"}, **options).ssd_stats
        for c in (1.0, 0.0)
    )
    assert many.hit_rate > few.hit_rate + 0.05 and many.acceptance_rate < few.acceptance_rate - 0.05


def test_a_draft_that_never_agrees_is_left_alone():
    """The plan becomes plain decoding, and the stats say so."""
    target, of_config = hf_ssd.enable(tiny_model()), {"lookahead": "auto", "budget": "auto"}
    output, _ = as_plain(target, tiny_model(seed=99), padded_batch(1), of_config, max_new_tokens=150)
    stats = output.ssd_stats
    assert stats.column("lookahead").count(0) > stats.rounds / 2
    assert "not drafting" in stats.reason or "probe" in stats.reason
