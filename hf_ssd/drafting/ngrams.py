"""N-grams that compete with a draft: the tokens that followed the last tokens of a row at an earlier occurrence."""

import os

from .prompt_lookup import PromptLookup

LONGEST_NGRAM = 16  # tokens
LEAST_MATCHED = 6  # last tokens of a row that must have occurred before; after shorter matches a draft is as good


class Ngrams:
    """
    The n-grams of all rows of a call. They depend on the verified text alone, so a speculation may be an n-gram or the
    draft's without any change of the distribution.

    Args:
        texts (`list[list[int]]`): The verified tokens of each row.
    """

    def __init__(self, texts: list[list[int]]):
        self.rows = [PromptLookup(text) for text in texts]
        self.unread: list[list[int]] = [[] for _ in texts]
        self.proposed: list[list[int]] | None = None  # for the speculation that is being verified, if it was asked

    def take_in(self, new: list[list[int]]) -> list[int]:
        """
        Adds the new tokens of each row. Returns how many tokens the last proposals give the rows, the bonus token
        included; 0 without a match, -1 for a row without new tokens or if no proposal was asked for.
        """
        proposed, self.proposed = self.proposed, None
        for unread, tokens in zip(self.unread, new):
            unread += tokens
        if proposed is None:
            return [-1] * len(new)
        right = [len(os.path.commonprefix([*pair])) for pair in zip(proposed, new)]
        return [(1 + n if one else 0) if tokens else -1 for n, one, tokens in zip(right, proposed, new)]

    def propose(self, finished: list[bool]) -> list[list[int]]:
        """Returns up to `LONGEST_NGRAM` tokens of each row, none without a match or for a finished row."""
        for row, unread in zip(self.rows, self.unread):
            row.extend(unread)
            unread.clear()
        self.proposed = [
            [] if ends else row.propose(LONGEST_NGRAM, LEAST_MATCHED) for row, ends in zip(self.rows, finished)
        ]
        return self.proposed
