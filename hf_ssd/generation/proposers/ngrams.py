"""N-grams of the rows of a call: instead of drafted tokens, without a draft, or after a miss."""

import os

import torch

from ...drafting.ngrams import LEAST_AFTER_A_MISS, LEAST_ALONE, LEAST_MATCHED, LONGEST_NGRAM, NgramIndex
from ...rounds import Speculation
from .base import Proposer


class Ngrams:
    """
    The n-grams of all rows of a call. They depend on the verified text alone, so a speculation may be an n-gram or the
    draft's without any change of the distribution.
    """

    def __init__(self, texts: list[list[int]]):
        self.texts, self.rows = texts, [NgramIndex(text) for text in texts]
        self.proposed: list[list[int]] | None = None  # after the last tokens, if somebody asked
        self.matched: list[int] = []  # last tokens of each row that had occurred before the last proposals

    def compare(self, new: list[list[int]]) -> list[int]:
        """
        Returns how many of the new tokens of each row the last proposals give, the bonus token included; 0 without a
        match, -1 for a row without new tokens or if no proposal was asked for.
        """
        proposed, self.proposed = self.proposed, None
        if proposed is None:
            return [-1] * len(new)
        right = [len(os.path.commonprefix([*pair])) for pair in zip(proposed, new)]
        return [(1 + n if one else 0) if tokens else -1 for n, one, tokens in zip(right, proposed, new)]

    def propose(self, finished: list[bool], count: int, alone: bool) -> list[list[int]]:
        """Returns at most `count` tokens to verify of each row. Shorter matches count if nothing else is drafted."""
        for row, text in zip(self.rows, self.texts):
            row.extend(text[len(row.tokens) :])
        most, least = max(count, LONGEST_NGRAM), LEAST_ALONE if alone else LEAST_MATCHED
        self.proposed = [[] if ends else row.propose(most) for row, ends in zip(self.rows, finished)]
        self.matched = [row.matched if tokens else 0 for row, tokens in zip(self.rows, self.proposed)]
        return [tokens[:count] if n >= least else [] for tokens, n in zip(self.proposed, self.matched)]


class NGramFallback(Proposer):
    """Proposes the tokens that followed the last tokens of a row at an earlier occurrence. See [`NgramIndex`]."""

    def __init__(self):
        self.texts: dict[int, NgramIndex] = {}

    def propose(self, ids: torch.LongTensor, lengths: list[int], rows: list[int], lookahead: int) -> Speculation:
        texts = [self.texts.setdefault(row, NgramIndex([])) for row in rows]
        for row, text in zip(rows, texts):
            text.extend(ids[row, len(text.tokens) : lengths[row]].tolist())
        return Speculation([text.propose(lookahead, LEAST_AFTER_A_MISS) for text in texts])
