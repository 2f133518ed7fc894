import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import (
    EncoderRepetitionPenaltyLogitsProcessor,
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_ssd.distributed.target_ranks import TargetRanks
from hf_ssd.generation import deciding
from hf_ssd.generation.deciding import Decider
from hf_ssd.generation.sequences import Sequences
from hf_ssd.noise import Noise

from ..helpers.call_settings import call_settings

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
    decider = Decider(settings, sequences, Noise(1, VOCAB) if do_sample else None, [0] * ROWS, TargetRanks(), None)
    logits = logits.bfloat16()
    with Largest() as largest:
        outcome = decider.decide(logits, q, following)
    _, scores, _ = decider.of_round
    return outcome, torch.stack(scores), largest.bytes / size


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", PROCESSORS)
def test_slices_of_rows_change_nothing(name, do_sample, monkeypatch):
    outcome, scores, _ = decide(name, do_sample, ROWS, monkeypatch)
    assert {*outcome.accepted} == {0, 1, 2, 3}
    for rows_at_a_time in (1, 5, 23):
        of_slices = decide(name, do_sample, rows_at_a_time, monkeypatch)
        assert of_slices[0] == outcome and torch.equal(of_slices[1], scores)


@pytest.mark.parametrize("name", PROCESSORS)
def test_slices_bound_the_memory(name, monkeypatch):
    """Indices of sorted scores are twice as large as scores; one tensor may have one position of every row."""
    assert decide(name, True, ROWS, monkeypatch)[2] >= ROWS
    for rows_at_a_time in (4, 8):
        allowed = max(2 * rows_at_a_time, ROWS / (LOOKAHEAD + 1))
        assert decide(name, True, rows_at_a_time, monkeypatch)[2] <= allowed


def test_slices_that_take_the_wrong_rows_are_noticed(monkeypatch):
    """The mutant: row numbers begin anew in each slice."""
    process = deciding.process_positions

    def mutant(processors, scores, input_ids, lengths, rows):
        return process(processors, scores, input_ids, lengths, list(range(len(rows))))

    monkeypatch.setattr(deciding, "process_positions", mutant)
    with pytest.raises(AssertionError):
        test_slices_of_rows_change_nothing("history", True, monkeypatch)
