"""Options that need a call of their own: constraints, ends, streamers, scores, caches; others are in `matrix.py`."""

import pytest
import torch
from transformers import (
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

import hf_ssd
from hf_ssd.cache.cache_name import CACHE
from hf_ssd.generation import deciding

from ..helpers.tiny import VOCAB, padded_batch

CONFIG = hf_ssd.SSDConfig(lookahead=4, budget=12)


def both(target, assistant, inputs, **options):
    """Returns the outputs of plain generate() and of SSD."""
    options = {"max_new_tokens": 30, "do_sample": False, **options}
    plain = target.generate(**inputs, **options)
    return plain, target.generate(**inputs, **options, assistant_model=assistant, ssd_config=CONFIG)


class Tree:
    """Allows what stands in a tree of prefixes, and knows no other: a few ways on from each token."""

    def __init__(self, prompt_length):
        self.prompt_length, self.asked = prompt_length, 0

    def ways(self, token):
        return [(token * 5 + step) % VOCAB for step in (1, 8, 30)]

    def __call__(self, row, ids):
        self.asked += 1
        ids = ids.tolist()[self.prompt_length - 1 :]
        if any(after not in self.ways(before) for before, after in zip(ids, ids[1:])):
            return []  # for which transformers raises
        return self.ways(ids[-1])


@pytest.mark.parametrize("rows", [1, 4])
def test_a_constraint_is_asked_for_no_prefix_that_it_rules_out(target, assistant, rows):
    plain, ssd = both(target, assistant, padded_batch(rows), prefix_allowed_tokens_fn=Tree(9))
    assert torch.equal(plain, ssd)


def test_asking_a_constraint_for_all_that_was_drafted_is_noticed(target, assistant, monkeypatch):
    """The mutant: as it is for processors of which nothing is known."""
    monkeypatch.setattr(deciding, "has_constraint", lambda processors: False)
    with pytest.raises(ValueError, match="returned an empty list"):
        both(target, assistant, padded_batch(4), prefix_allowed_tokens_fn=Tree(9))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("minimum", [0, 12])
def test_eos_lists_cut_where_plain_generate_cuts(target, assistant, rows, minimum):
    inputs = padded_batch(rows)
    plain = target.generate(**inputs, max_new_tokens=30, do_sample=False)
    # Tokens that really occur, at different places of different rows, also within a round.
    eos = sorted({int(plain[row, 9 + 5 + 4 * row]) for row in range(rows)})
    plain, ssd = both(target, assistant, inputs, eos_token_id=eos, min_new_tokens=minimum)
    assert torch.equal(plain, ssd)
    assert ssd.shape[1] < 9 + 30 or minimum


class StopsAtLength(StoppingCriteria):
    """Each row at a length of its own, as user code may do."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= 15 + 3 * row for row in range(len(input_ids))])


class StopsOnToken(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


class StopsOnScore(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return (
            scores[-1].max(-1).values > scores[0].max(-1).values
            if len(scores) > 3
            else torch.zeros(len(input_ids)).bool()
        )


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("eos", [None, 50])
def test_custom_criteria(target, assistant, rows, eos):
    inputs = padded_batch(rows)
    plain = target.generate(**inputs, max_new_tokens=30, do_sample=False)
    token = int(plain[0, 9 + 6])
    for criterion in (StopsAtLength(), StopsOnToken(token)):
        plain, ssd = both(
            target, assistant, inputs, stopping_criteria=StoppingCriteriaList([criterion]), eos_token_id=eos
        )
        assert torch.equal(plain, ssd)


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


class Recorder(BaseStreamer):
    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.ended += 1


def test_streamers_see_what_plain_generate_shows_them(target, assistant, tokenizer):
    recorders = Recorder(), Recorder()
    inputs, options = padded_batch(1), {"max_new_tokens": 20, "do_sample": False}
    target.generate(**inputs, **options, streamer=recorders[0])
    target.generate(**inputs, **options, streamer=recorders[1], assistant_model=assistant, ssd_config=CONFIG)
    assert recorders[0].values == recorders[1].values and recorders[1].ended == 1
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
    output = target.generate(**inputs, **options, streamer=streamer, assistant_model=assistant, ssd_config=CONFIG)
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


@pytest.mark.parametrize("family, name", [("llama", CACHE), ("llama", "past_key_values"), ("gemma", CACHE)])
def test_continuing_from_a_cache(family, name, target, assistant):
    if family == "gemma":
        from ..helpers.tiny import tiny_draft, tiny_model

        target = hf_ssd.enable(tiny_model("gemma"))
        assistant = tiny_draft("gemma")
    options = {"do_sample": False, "return_dict_in_generate": True}
    ssd = {"assistant_model": assistant, "ssd_config": CONFIG}
    inputs = padded_batch(1)
    whole = target.generate(**inputs, max_new_tokens=30, **options)
    for first, second in [(ssd, ssd), (ssd, {}), ({}, ssd)]:  # both directions between plain and SSD
        half = target.generate(**inputs, max_new_tokens=13, **options, **first)
        assert half[CACHE].get_seq_length() == 9 + 13 - 1
        rest = target.generate(
            half.sequences,
            attention_mask=torch.ones_like(half.sequences),
            **{name: half[CACHE]},
            max_new_tokens=17,
            **options,
            **second,
        )
        assert torch.equal(rest.sequences, whole.sequences)
        assert rest[CACHE].get_seq_length() == 9 + 30 - 1


def test_num_return_sequences_and_set_seed(target, assistant):
    options = {
        "max_new_tokens": 15,
        "do_sample": True,
        "num_return_sequences": 3,
        "assistant_model": assistant,
        "ssd_config": CONFIG,
    }
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(target.generate(**padded_batch(2), **options))
    assert outputs[0].shape == (6, 9 + 15)
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    assert len({tuple(row.tolist()) for row in outputs[0][:3]}) > 1


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
