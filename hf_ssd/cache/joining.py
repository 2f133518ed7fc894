"""A row that joins rows which are being decoded: its text is read in a cache of its own, piece by piece."""

import torch

from .cached_model import CachedModel
from .ragged import RaggedCache


class JoiningRow:
    """The text of a row that is to join the rows of `decoder`, as far as it was read."""

    def __init__(self, decoder: CachedModel):
        self.decoder, self.length = decoder, 0
        self.alone = CachedModel(decoder.model, RaggedCache(), column_limit=decoder.column_limit, view=decoder.view)

    def read(self, tokens: torch.LongTensor) -> None:
        """Reads the next tokens `(count,)` of the text."""
        if len(tokens):
            no_logits = torch.zeros(1, dtype=torch.long, device=self.decoder.device)
            self.alone.extend(tokens[None].to(self.decoder.device), [self.length], no_logits)
            self.length += len(tokens)

    def join(self, row: int) -> None:
        """Takes the place of a row that is left out."""
        self.decoder.cache.take_row(row, self.alone.cache)
