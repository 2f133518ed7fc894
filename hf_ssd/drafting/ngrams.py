"""N-grams of the rows of a call: the tokens that followed the last tokens of a row at an earlier occurrence."""

import os

from ..rounds import NGRAM, NOTHING, RoundRecord, Speculation
from .fallbacks import padded
from .prompt_lookup import PromptLookup

LONGEST_NGRAM = 16  # tokens
LEAST_MATCHED = 6  # last tokens of a row that must have occurred before; after shorter matches a draft is as good
LEAST_ALONE = 2  # the same where nothing is drafted


class Ngrams:
    """
    The n-grams of all rows of a call. They depend on the verified text alone, so a speculation may be an n-gram or the
    draft's without any change of the distribution.

    Args:
        texts (`list[list[int]]`): The verified tokens of each row.

    Attributes:
        proposed (`list[list[int]]`, *optional*): For the speculation that is verified next, if it was asked for.
        matched (`list[int]`): For each row, how many of its last tokens had occurred before these proposals.
    """

    def __init__(self, texts: list[list[int]]):
        self.rows = [PromptLookup(text) for text in texts]
        self.unread: list[list[int]] = [[] for _ in texts]
        self.proposed: list[list[int]] | None = None
        self.matched: list[int] = []

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

    def propose(self, finished: list[bool], count: int = LONGEST_NGRAM, alone: bool = False) -> list[list[int]]:
        """
        Returns up to `count` tokens of each row, none if it is finished or its last tokens have not occurred before.

        Args:
            finished (`list[bool]`): Whether each row is finished.
            count (`int`, *optional*): The most tokens.
            alone (`bool`, *optional*): Whether nothing is drafted besides, so that shorter matches count too.
        """
        least = LEAST_ALONE if alone else LEAST_MATCHED
        for row, unread in zip(self.rows, self.unread):
            row.extend(unread)
            unread.clear()
        self.proposed = [[] if ends else row.propose(count, least) for row, ends in zip(self.rows, finished)]
        self.matched = [row.matched if tokens else 0 for row, tokens in zip(self.rows, self.proposed)]
        return self.proposed


def speculation_of(ngrams: list[list[int]], mode: str, lookup: int = 0) -> Speculation:
    """Returns a speculation of n-grams alone. Rows without an n-gram have no tokens besides padding."""
    width = max(map(len, ngrams))
    record = RoundRecord(mode, width, sources=[NGRAM if ngram else NOTHING for ngram in ngrams], lookup=lookup)
    record.lengths = list(map(len, ngrams))
    return Speculation(padded(ngrams, width), None, record, are_certain=True)
