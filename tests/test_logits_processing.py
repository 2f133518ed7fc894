import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_ssd.logits_processing import needs_history, process_branches, process_positions

STATELESS = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(9), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)]


class ByRow(LogitsProcessor):
    """Depends on the row number and the length, as a user's own processor may."""

    def __call__(self, input_ids, scores):
        assert len(input_ids) == len(scores) == 3
        return scores + torch.arange(3.0)[:, None] * input_ids.shape[1]


WITH_HISTORY = [
    RepetitionPenaltyLogitsProcessor(1.3),
    NoRepeatNGramLogitsProcessor(2),
    NoBadWordsLogitsProcessor([[5, 6]]),
]


@pytest.mark.parametrize("lengths", [[4, 4, 4], [4, 6, 5], [3, 9, 3]])
@pytest.mark.parametrize("processors", [STATELESS, WITH_HISTORY, [*WITH_HISTORY, ByRow(), *STATELESS]])
def test_positions_equal_one_call_for_each(lengths, processors):
    torch.manual_seed(0)
    processors = LogitsProcessorList(processors)
    ids, scores = torch.randint(0, 12, (3, 16)), torch.randn(3, 4, 12)
    result = process_positions(processors, scores.clone(), ids, lengths)
    for row, position in [(r, p) for r in range(3) for p in range(4)]:
        history = ids[:, : lengths[row] + position]
        alone = processors(history, scores[:, position].clone())[row]
        assert torch.equal(result[row, position], alone)


def test_branches_equal_one_call_for_each():
    torch.manual_seed(0)
    processors = LogitsProcessorList([*WITH_HISTORY, *STATELESS])
    histories, scores, lengths = torch.randint(0, 12, (5, 9)), torch.randn(5, 12), torch.tensor([3, 9, 5, 5, 2])
    result = process_branches(processors, scores.clone(), histories, lengths)
    for i, length in enumerate(lengths.tolist()):
        assert torch.equal(result[i], processors(histories[i : i + 1, :length], scores[i : i + 1].clone())[0])


def test_which_processors_need_history():
    assert not needs_history(LogitsProcessorList(STATELESS))
    assert needs_history(LogitsProcessorList([*STATELESS, RepetitionPenaltyLogitsProcessor(1.1)]))
