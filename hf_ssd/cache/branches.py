"""Prefix and branches in one cache: many continuations of each row, one token of each per forward pass."""

import torch

from . import masks
from .cached_model import CachedModel


class Branches:
    """
    Continuations that fork from different places of a row's prefix. Branch `i` of row `r` sees the first `forks[r, i]`
    columns of the prefix and its own tokens. The tokens of depth `d` stand in columns `base + d * N + i`, beyond the
    prefix of every row, so that writing them moves nothing; to drop all branches is to forget them.

    Args:
        decoder (`CachedModel`): The draft model and its cache, which holds the prefix.
        forks (`torch.LongTensor` of shape `(batch_size, N)`): Prefix columns that each branch sees.
        base (`int`): First column that no prefix uses.
        depth (`int`): How many tokens a branch may grow.
    """

    def __init__(self, decoder: CachedModel, forks: torch.LongTensor, base: int, depth: int):
        forks = decoder.computed(forks)
        self.decoder, self.forks, self.base, self.depth = decoder, forks, base, 0
        self.count = forks.shape[1]
        # A branch at depth d sees what it saw at depth d - 1 and its own new column: the mask is filled as it grows.
        width = decoder.columns_seen(base + depth * self.count, self.count)
        self.allowed = masks.visible_up_to(forks - 1, width)
        self.positions_of_columns = None
        if decoder.layout.window is not None:
            prefix = torch.arange(base, device=forks.device).expand(*forks.shape, base)
            grown = forks.repeat(1, depth)[:, None, :] + torch.arange(depth, device=forks.device).repeat_interleave(
                self.count
            )
            self.positions_of_columns = torch.cat([prefix, grown.expand(*forks.shape, -1)], dim=2)
            unused = width - self.positions_of_columns.shape[2]
            self.positions_of_columns = torch.nn.functional.pad(self.positions_of_columns, (0, unused))
        self.additive = masks.additive(self.allowed, decoder.dtype)

    def grow(self, tokens: torch.LongTensor) -> torch.Tensor:
        """
        Feeds one token to each branch.

        Args:
            tokens (`torch.LongTensor` of shape `(batch_size, N)`): The next token of each branch.

        Returns:
            `torch.FloatTensor` of shape `(batch_size, N, vocab_size)`: Raw logits for the token after it.
        """
        start = self.base + self.depth * self.count
        stop = start + self.count
        positions = self.forks + self.depth
        self.additive[:, 0, :, start:stop].diagonal(dim1=-2, dim2=-1).zero_()
        seen = self.decoder.cache.window or stop
        mask = self.additive[..., :seen]
        if self.positions_of_columns is not None:
            self.allowed[:, :, start:stop].diagonal(dim1=-2, dim2=-1).fill_(True)
            mask = self.decoder.mask(self.allowed[..., :seen], positions, self.positions_of_columns[..., :seen])
        self.decoder.cache.place(slice(start, stop), stop)
        self.depth += 1
        return self.decoder.forward(self.decoder.computed(tokens), self.decoder.positions(positions), mask)
