"""N-grams of the rows of a call: instead of drafted tokens, without a draft, or after a miss."""

import os

from ...drafting.ngrams import LEAST_AFTER_A_MISS, LEAST_ALONE, LEAST_MATCHED, NgramIndex
from ...rounds import LONGEST_EARLY
from .base import Proposal, Proposer


class Ngrams(Proposer):
    """
    Proposes the tokens that followed the last tokens of a row at an earlier occurrence. See [`NgramIndex`]. They depend
    on the verified text alone, so a speculation may be an n-gram or the draft's without any change of the distribution.
    """

    def __init__(self):
        self.rows: list[NgramIndex] = []
        self.found: list[tuple[list[int], int]] | None = None  # last `first`: tokens, and how many had matched

    def read(self, texts: list[list[int]]) -> None:
        """Takes in the tokens that the texts have gained."""
        self.rows = self.rows or [NgramIndex([]) for _ in texts]
        for row, text in zip(self.rows, texts):
            row.extend(text[len(row.tokens) :])

    def propose(self, texts: list[list[int]], rows: list[int], lookahead: int) -> list[Proposal]:
        self.read(texts)
        return [Proposal(self.rows[row].propose(lookahead, LEAST_AFTER_A_MISS)) for row in rows]

    def first(self, texts: list[list[int]], live: list[bool], most: int, is_alone: bool) -> list[list[int]]:
        """Returns at most this many tokens to verify of each row. Shorter matches count if nothing else is drafted."""
        self.read(texts)
        count, least = max(most, LONGEST_EARLY), LEAST_ALONE if is_alone else LEAST_MATCHED
        self.found = [
            (row.propose(count), row.matched) if goes_on else ([], 0) for row, goes_on in zip(self.rows, live)
        ]
        return [tokens[:most] if matched >= least else [] for tokens, matched in self.found]

    def compare(self, new: list[list[int]]) -> tuple[list[int], list[int]]:
        """
        Returns how many of the new tokens of each row the last `first` gives, the bonus token included: where nothing
        is drafted, and beside a draft. 0 without a match, -1 for a row without new tokens, and no numbers if nobody
        asked.
        """
        found, self.found = self.found or [], None
        right = [len(os.path.commonprefix([tokens, of_row])) for (tokens, _), of_row in zip(found, new)]
        alone = [(1 + n if tokens else 0) if of_row else -1 for n, (tokens, _), of_row in zip(right, found, new)]
        beside = [n if matched >= LEAST_MATCHED else min(n, 0) for n, (_, matched) in zip(alone, found)]
        return alone, beside
