import torch

from hf_ssd.generation.sequences import Sequences

from ..helpers.call_settings import call_settings


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
