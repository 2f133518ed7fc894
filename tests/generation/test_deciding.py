"""Decisions in slices of rows, and the room for the tokens that they give."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

import hf_ssd
from hf_ssd.generation import deciding
from hf_ssd.generation.deciding import CallRows
from hf_ssd.generation.sequences import Sequences
from hf_ssd.generation.settings import Settings

from ..helpers import comparing
from ..helpers.tiny import VOCAB, padded_batch

ROWS, LOOKAHEAD = 12, 3
HISTORY = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.4}
CASES = {  # settings and options of a call
    "none": ({}, {}),
    "warpers": ({}, {"top_k": 40, "top_p": 0.9}),
    "history": ({}, {**HISTORY, "top_k": 40, "max_new_tokens": 30, "min_length": 25, "eos_token_id": 3}),
    "trees": ({"tree_nodes": 8, "verification": "coupled"}, {}),
}


class Largest(TorchDispatchMode):
    """Notes how many bytes the largest tensor has that an operation makes, and not only views."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        known = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in known:
                self.bytes = max(self.bytes, one.numel() * one.element_size())
        return result


def call(pair, name, do_sample, rows_at_a_time, monkeypatch):
    """A call with so many rows in a slice, and the size of the largest tensor of its decisions, in rows."""
    size, largest, decide = (LOOKAHEAD + 1) * VOCAB * 4, Largest(), CallRows._decide
    of_config, options = CASES[name]

    def noted(self, logits, *arguments):
        logits = logits.bfloat16()  # of which a slice makes float32
        with largest:
            return decide(self, logits, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(deciding, "SLICE_BYTES", rows_at_a_time * size)
        patch.setattr(CallRows, "_decide", noted)
        torch.manual_seed(1)
        options = {"max_new_tokens": 12, "do_sample": do_sample, "output_scores": True, **options}
        output = comparing.generate(*pair, padded_batch(ROWS), {"lookahead": LOOKAHEAD, **of_config}, **options)
    return output, largest.bytes / size


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_slices_of_rows_change_nothing_and_bound_the_memory(name, do_sample, target, draft, monkeypatch):
    """Indices of sorted scores are twice as large as scores; one tensor may have one position of every row."""
    whole, most = call((target, draft), name, do_sample, ROWS, monkeypatch)
    assert {0, 1, 2, 3} <= {count for counts in whole.ssd_stats.column("accepted") for count in counts}
    assert most >= ROWS * do_sample
    for rows_at_a_time in (1, 5, 11):
        output, most = call((target, draft), name, do_sample, rows_at_a_time, monkeypatch)
        assert torch.equal(output.sequences, whole.sequences)
        assert output.ssd_stats.column("accepted") == whole.ssd_stats.column("accepted")
        assert all(map(torch.equal, output.scores, whole.scores))
        assert most <= max(2 * rows_at_a_time, ROWS / (LOOKAHEAD + 1))


def test_slices_that_take_the_wrong_rows_are_noticed(target, draft, monkeypatch):
    """The mutant: row numbers begin anew in each slice."""
    process = deciding.process_positions

    def mutant(processors, scores, input_ids, lengths, rows):
        return process(processors, scores, input_ids, lengths, list(range(len(rows))))

    monkeypatch.setattr(deciding, "process_positions", mutant)
    with pytest.raises(AssertionError):
        test_slices_of_rows_change_nothing_and_bound_the_memory("history", True, target, draft, monkeypatch)


def test_there_is_room_for_the_bonus_token_of_a_row_that_ends_with_the_storage():
    criteria = StoppingCriteriaList([MaxLengthCriteria(10**6)])
    settings = Settings(LogitsProcessorList(), criteria, GenerationConfig(), hf_ssd.SSDConfig())
    sequences = Sequences(torch.ones(2, 4, dtype=torch.long), settings)
    drafted = [[2, 3, 4], [5, 6, 7]]
    sequences.accept([[1], [1]])  # so that the 64th round ends exactly where the storage does
    expected = [[1] * 5, [1] * 5]
    for _ in range(200):
        sequences.propose(drafted)
        sequences.accept([[2, 3, 4, 8], [5, 9]])
        expected = [expected[0] + [2, 3, 4, 8], expected[1] + [5, 9]]
    for row in range(2):
        assert sequences.ids[row, : sequences.lengths[row]].tolist() == expected[row]
