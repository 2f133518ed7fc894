"""The most likely tokens."""

import pytest
import torch

from hf_ssd.argmax import argmax


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (2, 0, 7)])
def test_it_is_that_of_torch(shape):
    torch.manual_seed(0)
    scores = torch.randint(0, 3, shape).float()  # with many that are equal
    assert torch.equal(argmax(scores), scores.argmax(dim=-1)) and argmax(scores).dtype == torch.long
    # Views, and what is ruled out.
    scores = torch.tensor([[-torch.inf, 2.0, 1.0], [3.0, -torch.inf, 3.0]])
    assert argmax(scores).tolist() == [1, 0]
    assert argmax(scores.T).tolist() == scores.T.argmax(dim=-1).tolist()
    assert argmax(scores[:, 1:]).tolist() == [0, 1]
