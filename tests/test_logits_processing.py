import pytest
import torch
from transformers import LogitsProcessorList
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
OF_TEXTS = [RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(2), NoBadWordsLogitsProcessor([[5, 6]])]


@pytest.mark.parametrize("lengths", [[4, 4, 4], [3, 9, 5]])
@pytest.mark.parametrize("processors", [[BEHIND_PADDING], [*OF_TEXTS, *BY_LENGTH, *STATELESS]])
def test_positions_and_branches_equal_one_call_for_each(lengths, processors):
    torch.manual_seed(0)
    processors = LogitsProcessorList(processors)
    ids, scores = torch.randint(0, 12, (3, 16)), torch.randn(3, 4, 12)
    result = process_positions(processors, scores.clone(), ids, lengths, [0, 1, 2])
    for row, position in [(r, p) for r in range(3) for p in range(4)]:
        alone = processors(ids[:, : lengths[row] + position], scores[:, position].clone())[row]
        assert torch.equal(result[row, position], alone)
    if BEHIND_PADDING not in processors:
        result = process_branches(processors, scores[:, 0].clone(), ids, torch.tensor(lengths))
        for row, length in enumerate(lengths):
            assert torch.equal(
                result[row], processors(ids[row : row + 1, :length], scores[row : row + 1, 0].clone())[0]
            )


@pytest.mark.parametrize(
    "processor", [*STATELESS, *BY_LENGTH, OF_TEXTS[0], BEHIND_PADDING], ids=lambda of: type(of).__name__
)
@pytest.mark.parametrize("lengths", [[1, 3, 2], [9, 10, 12]])
def test_one_call_does_where_it_can(processor, lengths, monkeypatch):
    """With rows of all lengths there would be a call for each token, which takes longer than the forward pass."""
    calls, call = [], type(processor).__call__
    monkeypatch.setattr(type(processor), "__call__", lambda *args: calls.append(args) or call(*args))
    scores, ids = torch.randn(3, 2, 12), torch.randint(0, 12, (3, 16))
    process_positions(LogitsProcessorList([processor]), scores, ids, lengths, [0, 1, 2])
    assert len(calls) <= 1
    assert needs_history(LogitsProcessorList([*STATELESS, processor])) == (processor in (OF_TEXTS[0], BEHIND_PADDING))
