"""What users' own processors and constraints are shown: exactly what plain generate() shows them, and nothing else."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import hf_ssd
from hf_ssd.generation import deciding

from ..helpers.preparing import preparing
from ..helpers.tiny import VOCAB, padded_batch, tiny_draft

CONFIG = hf_ssd.SSDConfig(lookahead=4, budget=12, asynchronous=False)


@pytest.fixture(scope="module")
def draft():
    """One that agrees more often than that of the other tests: here four rows must agree at once."""
    return tiny_draft(disagreement=0.01)


class Recorder(LogitsProcessor):
    """Notes what it is shown, in order, and changes a little, by row and length."""

    def __init__(self):
        self.shown = []

    def __call__(self, input_ids, scores):
        self.shown.append(input_ids.tolist())
        scores = scores.clone()
        scores[range(len(scores)), [(7 * r + input_ids.shape[1]) % VOCAB for r in range(len(scores))]] += 1
        return scores


class Matcher(LogitsProcessor):
    """Keeps a state for each row, which it moves on by the last token in each call, as grammars do."""

    def __init__(self):
        self.states = None

    def __call__(self, input_ids, scores):
        if self.states is None:
            self.states = [0] * len(input_ids)
        else:
            self.states = [(3 * s + t) % 5 for s, t in zip(self.states, input_ids[:, -1].tolist())]
        allowed = torch.arange(VOCAB) % 5 != torch.tensor(self.states)[:, None]
        return scores.masked_fill(~allowed, -torch.inf)


class Prefixes:
    """Notes the prefixes that it is asked for, by row."""

    def __init__(self):
        self.asked = []

    def __call__(self, row, ids):
        self.asked.append((row, *ids.tolist()))
        return [token for token in range(VOCAB) if (token + int(ids[-1]) + row) % 3]


class EachRowAtItsLength(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= 14 + 2 * row for row in range(len(input_ids))])


def ways_to_end(target, name, tokenizer):
    plain = target.generate(**padded_batch(4), max_new_tokens=30, do_sample=False)
    tokens = sorted({int(plain[row, 9 + 3 + 4 * row]) for row in range(4)} - {0, 1})
    strings = {"stop_strings": tokenizer.convert_ids_to_tokens(tokens[:2]), "tokenizer": tokenizer}
    criteria = {"stopping_criteria": StoppingCriteriaList([EachRowAtItsLength()])}
    return {
        "limit": {},
        "eos": {"eos_token_id": tokens},
        "strings": {**strings, "eos_token_id": tokens[2:]},
        "strings alone": {**strings, "stop_strings": tokenizer.convert_ids_to_tokens(list(range(2, VOCAB, 4)))},
        "criteria": {**criteria, "eos_token_id": tokens[:1]},
        "criteria alone": criteria,
    }[name]


ENDS = ["limit", "eos", "strings", "strings alone", "criteria", "criteria alone"]


def both(target, draft, rows, options, own):
    """Plain and speculative output with processors made anew for each, and what these have noted."""
    outputs, notes = [], []
    for ssd in ({}, {"assistant_model": draft, "ssd_config": CONFIG}):
        processor, given = own()
        with preparing():
            arguments = {"max_new_tokens": 24, "do_sample": False, **padded_batch(rows), **options, **given, **ssd}
            outputs.append(target.generate(**arguments, return_dict_in_generate=True, output_scores=True))
        notes.append(processor)
    assert outputs[1].ssd_stats.draft_failure is None
    return outputs, notes


def a_processor(kind):
    processor = kind()
    return processor, {"logits_processor": LogitsProcessorList([processor])}


def a_constraint():
    constraint = Prefixes()
    return constraint, {"prefix_allowed_tokens_fn": constraint}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("end", ENDS)
def test_a_processor_is_called_as_in_plain_generation(target, draft, tokenizer, rows, end):
    options = ways_to_end(target, end, tokenizer)
    (plain, ssd), (expected, noted) = both(target, draft, rows, options, lambda: a_processor(Recorder))
    assert torch.equal(plain.sequences, ssd.sequences) and noted.shown == expected.shown
    assert len(plain.scores) == len(ssd.scores) and (end != "limit" or ssd.ssd_stats.tokens_per_round > 1.1)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("end", ["limit", "eos"])
def test_a_processor_may_keep_a_state(target, draft, tokenizer, rows, end):
    options = ways_to_end(target, end, tokenizer)
    (plain, ssd), _ = both(target, draft, rows, options, lambda: a_processor(Matcher))
    assert torch.equal(plain.sequences, ssd.sequences)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("end", ENDS)
def test_a_constraint_is_asked_for_no_other_prefix_than_in_plain_generation(target, draft, tokenizer, rows, end):
    options = ways_to_end(target, end, tokenizer)
    (plain, ssd), (expected, noted) = both(target, draft, rows, options, a_constraint)
    assert torch.equal(plain.sequences, ssd.sequences)
    assert set(noted.asked) <= set(expected.asked) and len(noted.asked) == len(set(noted.asked))
    assert end.startswith("criteria") or ssd.ssd_stats.tokens_per_round > 1.1


class OnlyAfter(LogitsProcessor):
    """A table of what may come next, which knows nothing behind an end, beyond the limit, or that it forbids itself."""

    def __init__(self, ends, prompt_length=9, limit=24):
        self.ends, self.prompt_length, self.table = ends, prompt_length, list(range(limit))

    def ways(self, token, step):
        return [(token * 5 + way + step) % VOCAB for way in (1, 8, 30)]

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, ids in enumerate(input_ids[:, self.prompt_length - 1 :].tolist()):
            ended = False
            for step, (before, after) in enumerate(zip(ids, ids[1:])):
                assert after == 0 if ended else after in self.ways(before, step)
                ended = ended or after in self.ends
            step = self.table[len(ids) - 1]
            forbidden = sorted(set(range(VOCAB)) - set(self.ways(ids[-1], step)))
            scores[row, forbidden] = -torch.inf
        return scores


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_table_that_knows_nothing_else_raises_nothing(target, draft, rows, sampled):
    for seed in range(6):
        ends = list(range(10 + seed, 90, 12))
        processors = LogitsProcessorList([OnlyAfter(ends)])
        torch.manual_seed(seed)
        with preparing():
            output = target.generate(
                **padded_batch(rows, seed=seed),
                max_new_tokens=24,
                do_sample=sampled,
                eos_token_id=ends,
                logits_processor=processors,
                assistant_model=draft,
                ssd_config=CONFIG,
            )
        assert output.shape[1] > 9


@pytest.mark.parametrize("end", ["eos", "limit"])
def test_a_processor_that_is_called_for_all_that_was_drafted_is_noticed(target, draft, tokenizer, end, monkeypatch):
    """The mutant: as it is for transformers' own processors."""
    monkeypatch.setattr(deciding, "are_by_row", lambda processors: True)
    with pytest.raises(AssertionError):
        test_a_processor_is_called_as_in_plain_generation(target, draft, tokenizer, 4, end)
