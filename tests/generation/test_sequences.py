import random

import pytest
import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from hf_ssd.generation.sequences import Sequences


def test_there_is_room_for_the_bonus_token_of_a_row_that_ends_with_the_storage():
    sequences = Sequences(torch.ones(2, 4, dtype=torch.long), StoppingCriteriaList([MaxLengthCriteria(10**6)]), 0)
    drafted = [[2, 3, 4], [5, 6, 7]]
    sequences.accept([0, 0], [1, 1])  # so that the 64th round ends exactly where the storage does
    expected = [[1] * 5, [1] * 5]
    for _ in range(200):
        sequences.propose(drafted)
        sequences.accept([3, 1], [8, 9])
        expected = [expected[0] + [2, 3, 4, 8], expected[1] + [5, 9]]
    for row in range(2):
        assert sequences.ids[row, : sequences.lengths[row]].tolist() == expected[row]


def test_a_finished_row_stays_as_it_is_and_the_last_tokens_are_known():
    sequences = Sequences(torch.ones(2, 4, dtype=torch.long), StoppingCriteriaList([MaxLengthCriteria(100)]), 0)
    assert sequences.last.tolist() == [1, 1]
    for drafted, accepted, bonus in (([2, 5], [0, 0], [3, 6]), ([2, 5], [1, -1], [8, 9]), ([4, 4], [0, -1], [7, 9])):
        sequences.propose([[token] for token in drafted])
        sequences.accept(accepted, bonus)
        assert sequences.last.tolist() == [sequences.ids[row, n - 1] for row, n in enumerate(sequences.lengths)]
    rows = [sequences.ids[row, :n].tolist() for row, n in enumerate(sequences.lengths)]
    assert rows == [[1, 1, 1, 1, 3, 2, 8, 7], [1, 1, 1, 1, 6]]


class WhenAllRowsHave(StoppingCriteria):
    """Compares rows: stops all of them once each has had the token."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids == self.token).any(1).all().expand(len(input_ids))


class Latch(StoppingCriteria):
    """Remembers what it saw: stops a row at the token after the one it waits for."""

    def __init__(self, token):
        self.token, self.seen = token, {}

    def __call__(self, input_ids, scores, **kwargs):
        stopped = torch.tensor([self.seen.get(row, False) for row in range(len(input_ids))])
        for row, token in enumerate(input_ids[:, -1].tolist()):
            self.seen[row] = self.seen.get(row, False) or token == self.token
        return stopped


PROMPT, LIMIT, PAD, EOS = 2, 24, 0, 9


def one_token_at_a_time(texts, criteria):
    """What plain generation makes of texts that are known: the output, as transformers' own loop cuts and pads it."""
    ids, unfinished = torch.ones(len(texts), PROMPT, dtype=torch.long), torch.ones(len(texts), dtype=torch.bool)
    has_eos = any(isinstance(one, EosTokenCriteria) for one in criteria)
    while unfinished.any():
        tokens = torch.tensor([text[ids.shape[1]] for text in texts])
        if has_eos:
            tokens = torch.where(unfinished, tokens, PAD)
        ids = torch.cat([ids, tokens[:, None]], dim=1)
        unfinished &= ~criteria(ids, None)
    return ids


def in_rounds(texts, criteria, chance):
    """The same from rounds in which rows grow by different amounts, with rejected drafts behind them."""
    sequences = Sequences(torch.ones(len(texts), PROMPT, dtype=torch.long), criteria, PAD)
    streamed = [[] for _ in texts]
    drafted = [[] for _ in texts]
    while any(sequences.unfinished):
        accepted = [chance.randint(0, len(drafted[0])) if unfinished else -1 for unfinished in sequences.unfinished]
        for row, count in enumerate(accepted):
            start = sequences.lengths[row]
            drafted[row][: max(count, 0)] = texts[row][start : start + max(count, 0)]
        sequences.propose(drafted)
        bonus = [text[length + max(count, 0)] for text, length, count in zip(texts, sequences.lengths, accepted)]
        new = sequences.accept(accepted, bonus)
        sequences.stop_where_plain_generation_would(new, lambda _: None)
        for row, tokens in enumerate(streamed):
            tokens += sequences.ids[row, PROMPT + len(tokens) : sequences.settled(row)].tolist()
        drafted = torch.randint(1, 10, (len(texts), 4)).tolist()  # among them what the criteria wait for
    return sequences.finish(), streamed


def criteria_of(kind, with_eos):
    own = {"limit": [], "compares": [WhenAllRowsHave(7)], "remembers": [Latch(7)]}[kind]
    end = [EosTokenCriteria(torch.tensor([EOS]))] if with_eos else []
    return StoppingCriteriaList([MaxLengthCriteria(LIMIT), *end, *own])


@pytest.mark.parametrize("with_eos", [False, True])
@pytest.mark.parametrize("kind", ["limit", "compares", "remembers"])
def test_the_output_and_what_is_streamed_are_those_of_one_token_at_a_time(kind, with_eos):
    chance = random.Random(0)
    for seed in range(60):
        torch.manual_seed(seed)
        texts = torch.randint(1, 10, (3, LIMIT + 12)).tolist()
        plain = one_token_at_a_time(texts, criteria_of(kind, with_eos))
        output, streamed = in_rounds(texts, criteria_of(kind, with_eos), chance)
        assert torch.equal(output, plain)
        for row, tokens in zip(plain[:, PROMPT:].tolist(), streamed):
            end = row.index(PAD) if PAD in row else len(row)  # texts have none
            assert tokens == row[:end]


@pytest.mark.parametrize("kind, mistake", [("limit", "settled"), ("compares", "judged"), ("remembers", "judged")])
def test_looking_at_tokens_that_may_not_stay_is_noticed(kind, mistake, monkeypatch):
    """The mutants: everything is streamed at once, and criteria are asked while some rows are still shorter."""
    if mistake == "settled":
        monkeypatch.setattr(Sequences, "settled", lambda self, row: self.kept(row))
    else:
        monkeypatch.setattr(Sequences, "_common_length", property(lambda self: max(self.lengths)))
    with pytest.raises(AssertionError):
        test_the_output_and_what_is_streamed_are_those_of_one_token_at_a_time(kind, False)
