"""Texts whose keys and values are known, so that a row that begins in the same way need not read them again."""

import os.path
from collections.abc import Mapping
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from .. import devices
from .attached import attached_to, values_of
from .cached_model import CachedModel
from .ragged import RaggedCache

WORTH_KEEPING = 64  # tokens that a row must share with another text before their columns are copied
AUTO, SHARE, MOST = -1, 8, 8 * 2**30  # "auto": a SHARE-th of the free memory, at most so many bytes


class KeptText(NamedTuple):
    """A text that has ended, with a cache of one row that holds exactly its columns."""

    tokens: list[int]
    cache: RaggedCache

    def shared(self, tokens: list[int]) -> int:
        """Returns how many first tokens a text has in common with this one. A recurrent state serves as a whole."""
        count = common(self.tokens, tokens)
        return 0 if self.cache.is_recurrent and count < len(self.tokens) else count


class KeptPrefixes:
    """Copies of the columns of a model's rows that have ended, for rows that join."""

    def __init__(self, most: int = 0):
        self.most = most  # bytes; AUTO: as many as the free memory allows
        self.texts: list[KeptText] = []  # in the order in which they were used, in which they go
        self.hits = 0  # tokens that were not read again
        self.marks: tuple | None = None  # of the weights, hooks and adapters that the columns were computed with

    def begin(self, model: PreTrainedModel, most: int) -> None:
        """Begins passes with a model as it is now. Columns of other weights, hooks or adapters are forgotten."""
        marks = (attached_to(model), values_of([*model.parameters(), *model.buffers()])) if most else None
        if marks != self.marks:
            self.texts.clear()
        self.most, self.marks = most, marks

    def close(self) -> None:
        """Forgets everything, and keeps nothing until it begins again."""
        self.most, self.marks = 0, None
        self.texts.clear()

    @property
    def nbytes(self) -> int:
        return sum(text.cache.nbytes for text in self.texts)

    def known(self, tokens: list[int], decoder: CachedModel, live: Mapping[int, list[int]]) -> int:
        """Returns how many first tokens need not be read. `live` has, by row, the tokens in the decoder's cache."""
        return self._longest(tokens, decoder, live)[0]

    def reader(self, tokens: list[int], decoder: CachedModel, live: Mapping[int, list[int]]) -> CachedModel:
        """Returns a row that is to join with a text that begins with `tokens`, and has read as many as are known."""
        count, source = self._longest(tokens, decoder, live)
        cache = None
        if isinstance(source, KeptText):
            self.texts.sort(key=lambda text: text is source)  # now last in order
            cache = source.cache.of_row(0, count)
        elif source is not None:
            cache = decoder.of_row(source, count)
        self.hits += count
        return decoder.of_one_row(cache, tokens[:count])

    def _longest(self, tokens, decoder, live) -> "tuple[int, KeptText | int | None]":
        """Returns how many tokens are known, and the text or the row that has their columns."""
        if not self.most:
            return 0, None
        found = [(decoder.reusable(row, common(text, tokens)), row) for row, text in live.items()]
        found += [(text.shared(tokens), text) for text in self.texts]
        count, source = max(found, key=lambda one: one[0], default=(0, None))
        return (count, source) if count >= WORTH_KEEPING else (0, None)

    def add(self, tokens: list[int], decoder: CachedModel, row: int) -> None:
        """Keeps the columns of a row of `decoder`, which hold these tokens, if there is memory for them."""
        count = decoder.reusable(row, len(tokens)) if self.most else 0
        if count < WORTH_KEEPING:
            return
        tokens, size = tokens[:count], count * decoder.cache.bytes_of_a_column
        limit, can_be_cut = self._limit(decoder.device), not decoder.cache.is_recurrent
        if size > limit or can_be_cut and any(text.tokens[:count] == tokens for text in self.texts):
            return
        # A text that goes on takes the place of its beginning.
        self.texts = [text for text in self.texts if text.tokens != tokens[: len(text.tokens) if can_be_cut else None]]
        self._keep_to(limit - size)
        try:
            self.texts.append(KeptText(tokens, decoder.of_row(row, count)))
        except torch.OutOfMemoryError:  # nobody needs what is kept
            self.texts.clear()
        self._keep_to(limit)

    def give_up(self, size: int) -> bool:
        """Forgets texts of at least so many bytes, if there are any. Returns whether it has."""
        if size > self.nbytes:
            return False
        self._keep_to(self.nbytes - size)
        return True

    def _keep_to(self, most: int) -> None:
        while self.texts and self.nbytes > most:
            self.texts.pop(0)

    def _limit(self, device: torch.device) -> int:
        """Returns the bytes that texts may have now."""
        free = devices.free_memory(device)
        most = MOST if self.most == AUTO else self.most
        if free is None:
            return most
        return min(most, (free + self.nbytes) // (SHARE if self.most == AUTO else 1))


def common(one: list[int], other: list[int]) -> int:
    """Returns how many first tokens two texts have in common."""
    return len(os.path.commonprefix([one, other]))
