"""N-grams: the tokens that followed the last tokens of a text earlier (prompt lookup, Saxena, 2023)."""

import os

from ...rounds import LONGEST_EARLY
from .base import Proposal, Proposer

LONGEST_MATCH = 16  # tokens of a match; longer matches count as this long
PLACES = 32  # earlier occurrences of the last two tokens that are compared, the latest first
TOKENS_PER_MATCHED = 4  # proposed tokens for each token of the match: what has matched for long goes on for long
LEAST_AFTER_A_MISS = 1  # last tokens of a row that must have occurred before, if n-grams are the fallback
LEAST_ALONE = 2  # the same where nothing is drafted
LEAST_MATCHED = 6  # the same beside a draft: after shorter matches a draft is as good


class Ngrams(Proposer):
    """Proposes the tokens that followed the last tokens of a row at an earlier occurrence. See [`NgramIndex`]."""

    def __init__(self):
        self.rows: dict[int, NgramIndex] = {}
        self.found: list[tuple[list[int], int]] | None = None  # last `first`: tokens, and how many had matched

    def _of(self, texts: list[list[int]], row: int) -> "NgramIndex":
        """Returns the index of a row, a new index if the row has another text than before."""
        if row not in self.rows or self.rows[row].tokens is not texts[row]:
            self.rows[row] = NgramIndex(texts[row])
        return self.rows[row]

    def propose(self, texts: list[list[int]], rows: list[int], lookahead: int) -> list[Proposal]:
        return [Proposal(self._of(texts, row).propose(lookahead, LEAST_AFTER_A_MISS)) for row in rows]

    def first(self, texts: list[list[int]], live: list[bool], most: int, is_alone: bool) -> list[list[int]]:
        """Returns at most this many tokens to verify of each row. Shorter matches count if nothing else is drafted."""
        count, least, self.found = max(most, LONGEST_EARLY), LEAST_ALONE if is_alone else LEAST_MATCHED, []
        for row, goes_on in enumerate(live):
            index = self._of(texts, row)
            self.found.append((index.propose(count), index.matched) if goes_on else ([], 0))
        return [tokens[:most] if matched >= least else [] for tokens, matched in self.found]

    def siblings(self, row: int, tokens: list[int], count: int) -> list[tuple[int, int]]:
        """Returns up to `count` siblings that a token tree verifies beside these tokens of a row."""
        return self.rows[row].siblings(tokens)[:count] if row in self.rows else []

    def compare(self, new: list[list[int]]) -> tuple[list[int], list[int]]:
        """
        Returns how many new tokens of each row the last `first` gives where nothing is drafted, and beside a draft; 0
        without a match, -1 for a row without new tokens.
        """
        found, self.found = self.found or [], None
        right = [len(os.path.commonprefix([tokens, of_row])) for (tokens, _), of_row in zip(found, new)]
        alone = [(1 + n if tokens else 0) if of_row else -1 for n, (tokens, _), of_row in zip(right, found, new)]
        beside = [n if matched >= LEAST_MATCHED else min(n, 0) for n, (_, matched) in zip(alone, found)]
        return alone, beside


class NgramIndex:
    """Finds earlier occurrences of the last tokens of a text, to which others append, by links between equal pairs."""

    def __init__(self, tokens: list[int]):
        self.tokens = tokens
        self.latest: dict[tuple[int, int], int] = {}  # the position after the latest occurrence of each pair
        self.earlier: list[int] = []  # for the pair that ends in each token, the position after the one before it, or 0
        self.latest_of_token: dict[int, int] = {}
        self.place = 0  # the position after the occurrence of the last token before this one, or 0
        self.matched = 0  # last tokens that had occurred before the last proposal, up to `LONGEST_MATCH`
        self.source = 0  # the position that the last match continued at, moved on with the text

    def read(self) -> None:
        """Takes in the tokens that the text has gained."""
        new = range(len(self.earlier), len(self.tokens))
        for end in new:
            pair = self.tokens[end - 1] if end else -1, self.tokens[end]
            self.earlier.append(self.latest.get(pair, 0))
            self.place = self.latest_of_token.get(pair[1], 0)
            self.latest[pair] = self.latest_of_token[pair[1]] = end + 1
        self.source += len(new) if self.source else 0

    def propose(self, count: int, least: int = LEAST_ALONE) -> list[int]:
        """
        Returns at most `count` tokens after the longest match of at least `least` tokens; of equally long matches that
        of the last proposal, or else the latest. A match that reaches into the end of the text is a repetition.
        """
        self.read()
        text, end = self.tokens, len(self.tokens)
        place, best, longest = (self.earlier[-1] if text else 0), 0, least - 1
        for candidate in (self.source, *self._occurrences(place)):
            matched = self._length(candidate) if candidate else 0
            if matched > longest:
                best, longest = candidate, matched
            if longest == LONGEST_MATCH:
                break
        if not best and least == 1 and self.place:
            best, longest = self.place, 1
        self.source, self.matched = best, longest
        if not best:
            return []
        period = end - best
        return [text[best + i % period] for i in range(min(count, TOKENS_PER_MATCHED * longest))]

    def siblings(self, tokens: list[int]) -> list[tuple[int, int]]:
        """Returns where other occurrences went on in another way, those of longer matches first: depths, tokens."""
        found = {}
        for place in sorted(self._occurrences(self.earlier[-1] if self.tokens else 0), key=self._length, reverse=True):
            others = self.tokens[place : place + len(tokens)]
            depth = len(os.path.commonprefix([others, tokens]))
            if depth < len(others):
                found[depth, others[depth]] = None
        return list(found)

    def _occurrences(self, place: int):
        for _ in range(PLACES):
            if not place:
                return
            yield place
            place = self.earlier[place - 1]

    def _length(self, place: int) -> int:
        """Returns how many tokens before a position equal the last tokens of the row, up to `LONGEST_MATCH`."""
        text, end, matched = self.tokens, len(self.tokens), 0
        while matched < min(LONGEST_MATCH, place) and text[place - 1 - matched] == text[end - 1 - matched]:
            matched += 1
        return matched
