import torch
from transformers import MaxLengthCriteria, StoppingCriteriaList

from hf_ssd.generation.sequences import Sequences


def test_there_is_room_for_the_bonus_token_of_a_row_that_ends_with_the_storage():
    sequences = Sequences(torch.ones(2, 4, dtype=torch.long), StoppingCriteriaList([MaxLengthCriteria(10**6)]), 0)
    drafted = torch.tensor([[2, 3, 4], [5, 6, 7]])
    sequences.accept([0, 0], torch.tensor([1, 1]))  # so that the 64th round ends exactly where the storage does
    expected = [[1] * 5, [1] * 5]
    for _ in range(200):
        sequences.propose(drafted)
        sequences.accept([3, 1], torch.tensor([8, 9]))
        expected = [expected[0] + [2, 3, 4, 8], expected[1] + [5, 9]]
    for row in range(2):
        assert sequences.ids[row, : sequences.lengths[row]].tolist() == expected[row]


def test_a_finished_row_stays_as_it_is_and_the_last_tokens_are_known():
    sequences = Sequences(torch.ones(2, 4, dtype=torch.long), StoppingCriteriaList([MaxLengthCriteria(100)]), 0)
    assert sequences.last.tolist() == [1, 1]
    for drafted, accepted, bonus in (([2, 5], [0, 0], [3, 6]), ([2, 5], [1, -1], [8, 9]), ([4, 4], [0, -1], [7, 9])):
        sequences.propose(torch.tensor(drafted)[:, None])
        sequences.accept(accepted, torch.tensor(bonus))
        assert sequences.last.tolist() == [sequences.ids[row, n - 1] for row, n in enumerate(sequences.lengths)]
    rows = [sequences.ids[row, :n].tolist() for row, n in enumerate(sequences.lengths)]
    assert rows == [[1, 1, 1, 1, 3, 2, 8, 7], [1, 1, 1, 1, 6]]
