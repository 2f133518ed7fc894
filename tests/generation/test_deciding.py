"""Decisions in slices of rows, and the room for the tokens that they give."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.logits_process import (
    EncoderRepetitionPenaltyLogitsProcessor,
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import hf_ssd
from hf_ssd.generation import deciding
from hf_ssd.generation.deciding import CallRows
from hf_ssd.generation.sequences import Sequences
from hf_ssd.generation.settings import Settings

ROWS, LOOKAHEAD, VOCAB = 24, 3, 101
PROMPTS = torch.randint(0, VOCAB, (ROWS, 7), generator=torch.Generator().manual_seed(0))
PROCESSORS = {
    "none": [],
    "warpers": [TopKLogitsWarper(40), TopPLogitsWarper(0.9)],
    "history": [
        RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=torch.arange(ROWS) % 5),
        NoRepeatNGramLogitsProcessor(2),
        EncoderRepetitionPenaltyLogitsProcessor(1.4, PROMPTS),
        MinLengthLogitsProcessor(10, [3]),
        TopKLogitsWarper(40),
    ],
}


def call_settings(processors=(), max_length=50, **options) -> Settings:
    """Returns settings of a call with these processors and options of `generate()`."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length)])
    return Settings(LogitsProcessorList(processors), criteria, GenerationConfig(**options), hf_ssd.SSDConfig())


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


def decide(name, do_sample, rows_at_a_time, monkeypatch):
    """Outcome and scores with so many rows in a slice, and the size of the largest tensor."""
    size = (LOOKAHEAD + 1) * VOCAB * 4
    monkeypatch.setattr(deciding, "SLICE_BYTES", rows_at_a_time * size)
    torch.manual_seed(1)
    logits = 3 * torch.randn(ROWS, LOOKAHEAD + 1, VOCAB)
    q = (logits[:, :-1] + torch.randn(ROWS, LOOKAHEAD, VOCAB)).softmax(-1)
    drafted = q.argmax(-1)
    options = {"do_sample": do_sample, "return_dict_in_generate": True, "output_scores": True}
    settings = call_settings(PROCESSORS[name], **options)
    sequences = Sequences(PROMPTS, settings)
    for row in range(ROWS):
        sequences.lengths[row] += row % 4  # what stands there is the padding
    following = sequences.propose(drafted.tolist())
    rows = CallRows(settings, sequences, 1, VOCAB, None)
    logits = logits.bfloat16()
    with Largest() as largest:
        outcome = rows.decide(logits, q, following)
    _, scores, _ = rows.of_round
    return outcome, torch.stack(scores), largest.bytes / size


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", PROCESSORS)
def test_slices_of_rows_change_nothing_and_bound_the_memory(name, do_sample, monkeypatch):
    """Indices of sorted scores are twice as large as scores; one tensor may have one position of every row."""
    outcome, scores, most = decide(name, do_sample, ROWS, monkeypatch)
    assert {*outcome.accepted} == {0, 1, 2, 3} and most >= ROWS * do_sample
    for rows_at_a_time in (1, 5, 23):
        of_slices = decide(name, do_sample, rows_at_a_time, monkeypatch)
        assert of_slices[0] == outcome and torch.equal(of_slices[1], scores)
        assert of_slices[2] <= max(2 * rows_at_a_time, ROWS / (LOOKAHEAD + 1))


def test_slices_that_take_the_wrong_rows_are_noticed(monkeypatch):
    """The mutant: row numbers begin anew in each slice."""
    process = deciding.process_positions

    def mutant(processors, scores, input_ids, lengths, rows):
        return process(processors, scores, input_ids, lengths, list(range(len(rows))))

    monkeypatch.setattr(deciding, "process_positions", mutant)
    with pytest.raises(AssertionError):
        test_slices_of_rows_change_nothing_and_bound_the_memory("history", True, monkeypatch)


def test_there_is_room_for_the_bonus_token_of_a_row_that_ends_with_the_storage():
    sequences = Sequences(torch.ones(2, 4, dtype=torch.long), call_settings(max_length=10**6))
    drafted = [[2, 3, 4], [5, 6, 7]]
    sequences.accept([[1], [1]])  # so that the 64th round ends exactly where the storage does
    expected = [[1] * 5, [1] * 5]
    for _ in range(200):
        sequences.propose(drafted)
        sequences.accept([[2, 3, 4, 8], [5, 9]])
        expected = [expected[0] + [2, 3, 4, 8], expected[1] + [5, 9]]
    for row in range(2):
        assert sequences.ids[row, : sequences.lengths[row]].tolist() == expected[row]
