import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_ssd.logits_processing import needs_history, process_branches, process_positions

STATELESS = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(9), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)]
STATELESS += [SuppressTokensLogitsProcessor([2, 7])]
BY_LENGTH = [MinLengthLogitsProcessor(6, 3), MinNewTokensLengthLogitsProcessor(4, 4, [5, 6])]
BEHIND_PADDING = RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=torch.tensor([0, 2, 3]))
IN_ONE_CALL = [*BY_LENGTH, RepetitionPenaltyLogitsProcessor(1.3), BEHIND_PADDING]


class ByRow(LogitsProcessor):
    """Depends on the row number and the length, as a user's own processor may."""

    def __call__(self, input_ids, scores):
        assert len(input_ids) == len(scores) == 3
        return scores + torch.arange(3.0)[:, None] * input_ids.shape[1]


WITH_HISTORY = [
    RepetitionPenaltyLogitsProcessor(1.3),
    RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=4),
    NoRepeatNGramLogitsProcessor(2),
    NoBadWordsLogitsProcessor([[5, 6]]),
]


@pytest.mark.parametrize("lengths", [[4, 4, 4], [4, 6, 5], [3, 9, 3]])
@pytest.mark.parametrize(
    "processors", [STATELESS, BY_LENGTH, [*WITH_HISTORY, BEHIND_PADDING], [*WITH_HISTORY, ByRow(), *STATELESS]]
)
def test_positions_equal_one_call_for_each(lengths, processors):
    torch.manual_seed(0)
    processors = LogitsProcessorList(processors)
    ids, scores = torch.randint(0, 12, (3, 16)), torch.randn(3, 4, 12)
    result = process_positions(processors, scores.clone(), ids, lengths, [0, 1, 2])
    for row, position in [(r, p) for r in range(3) for p in range(4)]:
        history = ids[:, : lengths[row] + position]
        alone = processors(history, scores[:, position].clone())[row]
        assert torch.equal(result[row, position], alone)


@pytest.mark.parametrize("processors", [BY_LENGTH, [*WITH_HISTORY, *BY_LENGTH, *STATELESS]])
def test_branches_equal_one_call_for_each(processors):
    torch.manual_seed(0)
    processors = LogitsProcessorList(processors)
    histories, scores, lengths = torch.randint(0, 12, (5, 9)), torch.randn(5, 12), torch.tensor([3, 9, 5, 5, 2])
    given = histories if needs_history(processors) else None
    result = process_branches(processors, scores.clone(), given, lengths)
    for i, length in enumerate(lengths.tolist()):
        assert torch.equal(result[i], processors(histories[i : i + 1, :length], scores[i : i + 1].clone())[0])


@pytest.mark.parametrize("processor", [*STATELESS, *IN_ONE_CALL], ids=lambda processor: type(processor).__name__)
@pytest.mark.parametrize("lengths", [[1, 3, 2], [9, 10, 12]])
def test_one_call_does_where_it_can(processor, lengths, monkeypatch):
    """With rows of all lengths there would be a call for each token, which takes longer than the forward pass."""
    calls, call = [], type(processor).__call__
    monkeypatch.setattr(type(processor), "__call__", lambda *args: calls.append(args) or call(*args))
    scores, ids = torch.randn(3, 2, 12), torch.randint(0, 12, (3, 16))
    process_positions(LogitsProcessorList([processor]), scores, ids, lengths, [0, 1, 2])
    assert len(calls) <= 1


def test_which_processors_need_history():
    assert not needs_history(LogitsProcessorList([*STATELESS, *BY_LENGTH]))
    assert needs_history(LogitsProcessorList([*STATELESS, RepetitionPenaltyLogitsProcessor(1.1)]))
