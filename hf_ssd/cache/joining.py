"""A row that joins rows which are being decoded: its text is read in a cache of its own, piece by piece."""

import torch

from .cached_model import CachedModel
from .ragged import RaggedCache


class JoiningRow:
    """The text of a row that is to join the rows of `decoder`, as far as it was read."""

    def __init__(self, decoder: CachedModel):
        self.decoder, self.length, self.alone = decoder, 0, decoder.of_one_row()
        self.features: list[torch.Tensor] = []  # `(tokens, width)` of the tokens read, if the decoder keeps features

    def begin_with(self, cache: RaggedCache, tokens: list[int]) -> None:
        """Takes a cache of one row, which has read these first tokens of the text."""
        self.length = len(tokens)
        self.alone.begin_with(cache, torch.tensor(tokens, device=self.decoder.device))

    def read(self, tokens: torch.LongTensor) -> None:
        """Reads the next tokens `(count,)` of the text."""
        if len(tokens):
            self.alone.read(tokens[None].to(self.decoder.device), self.length)
            self.length += len(tokens)
            if self.alone.features is not None:
                self.features.append(self.alone.features[0])

    def join(self, row: int) -> None:
        """Takes the place of a row that is left out."""
        self.decoder.take_row(row, self.alone, self.length)
