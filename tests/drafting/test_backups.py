"""Who proposes after a miss, and how that joins what was prepared, by hand."""

import torch
from hf_ssd.drafting.backups import Backups, join

from hf_ssd.drafting.fallbacks import NGramBackup, Proposal, RandomBackup
from hf_ssd.drafting.speculation_cache import Speculation

VOCAB = 10


def speculation(tokens: list[list[int]], hits: list[bool]) -> Speculation:
    """One whose tokens were certain."""
    tokens = torch.tensor(tokens)
    probabilities = torch.nn.functional.one_hot(tokens, VOCAB).float()
    return Speculation(tokens, probabilities, torch.tensor(hits))


def test_the_users_own_proposer_takes_the_place_of_all():
    own = NGramBackup()
    assert Backups(VOCAB, 0, own).of("ngram") == ("custom", own)
    assert Backups(VOCAB, 0, own).of("primary") == ("custom", own)


def test_the_draft_is_no_object():
    backups = Backups(VOCAB, 0)
    assert backups.of("primary") == ("primary", None)
    assert isinstance(backups.of("random")[1], RandomBackup)
    assert backups.of("ngram") == ("ngram", backups.ngram)


def test_rows_that_hit_keep_what_is_ready():
    ready = speculation([[1, 2], [3, 4], [5, 6]], [True, False, True])
    joined = join(ready, [1], Proposal(torch.tensor([[7, 8, 0]]), [2]), VOCAB, with_probabilities=True)
    assert joined.tokens.tolist() == [[1, 2, 0], [7, 8, 0], [5, 6, 0]]
    assert joined.probabilities.argmax(dim=-1).tolist() == joined.tokens.tolist()
    assert torch.equal(joined.probabilities.sum(dim=-1), torch.ones(3, 3))


def test_what_another_draft_prepared_with_an_earlier_plan_is_cut():
    ready = speculation([[1, 2, 3], [0, 0, 0]], [True, False])
    joined = join(ready, [1], Proposal(torch.tensor([[7, 8]]), [2]), VOCAB, with_probabilities=True)
    assert joined.tokens.tolist() == [[1, 2], [7, 8]]
    assert joined.probabilities.argmax(dim=-1).tolist() == joined.tokens.tolist()


def test_if_no_row_hit_it_is_as_wide_as_the_longest_proposal():
    ready = speculation([[1, 2], [3, 4], [5, 6]], [False, False, False])
    uniform = torch.full((2, 3, VOCAB), 1 / VOCAB)
    joined = join(ready, [0, 2], Proposal(torch.tensor([[7, 0, 0], [8, 9, 0]]), [1, 2], uniform), VOCAB, True)
    assert joined.tokens.tolist() == [[7, 0], [0, 0], [8, 9]]
    assert torch.equal(joined.probabilities[[0, 2]], uniform[:, :2])
    assert torch.equal(joined.probabilities[1], torch.eye(VOCAB)[[0, 0]])  # a finished row


def test_greedy_speculations_have_no_probabilities():
    ready = Speculation(torch.tensor([[1]]), None, torch.tensor([False]))
    assert join(ready, [0], Proposal(torch.tensor([[7, 0]]), [1]), VOCAB, False).probabilities is None
