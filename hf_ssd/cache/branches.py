"""Branches of each row, in the same cache as its verified prefix. They grow token by token or in a single pass."""

import torch

from ..devices import from_host
from . import masks
from .cached_model import CachedModel


class Branches:
    """Branches, of which number `i` of row `r` sees `forks[r, i]` columns of the verified prefix and its own tokens."""

    def __init__(self, decoder: CachedModel, forks: torch.LongTensor, base: int, depth: int):
        forks = decoder.computed(forks)
        self.decoder, self.base, self.depth, self.count = decoder, base, 0, forks.shape[1]
        # Columns and positions of all depths, `(depth, 2, rows, N)`, in one transfer.
        branches, depths = (torch.arange(n, device=forks.device) for n in (self.count, depth))
        grown = forks + depths[:, None, None]
        columns = (base + depths[:, None] * self.count + branches)[:, None].expand_as(grown)
        positions = decoder.positions(grown.transpose(0, 1)).transpose(0, 1)
        self.places = from_host(torch.stack([columns, positions], dim=1), decoder.device)
        width = decoder.columns_seen(base + depth * self.count, self.count)
        self.ends, column = from_host(forks, decoder.device), torch.arange(width, device=decoder.device)
        self.allowed = masks.visible_up_to(self.ends - 1, width)  # what each branch sees: `(rows, N, columns)`
        if decoder.layout.window is None:  # all layers see alike, so that a mask serves at all depths
            self.mask = decoder.mask(self.allowed, self.ends, column)
        else:
            own = self.ends[:, :, None] + (column - base).div(self.count, rounding_mode="floor")
            self.mask, self.of_columns = None, torch.where(column < base, column, own)  # positions of the columns

    def grow(self, tokens: torch.LongTensor) -> torch.Tensor:
        """Feeds tokens `(batch_size, N)`, and returns raw logits `(batch_size, N, vocab_size)`."""
        start = self.base + self.depth * self.count
        stop, window, places = start + self.count, self.decoder.cache.window, self.places[self.depth]
        if self.mask is not None:  # each branch sees its new column
            self.mask[:, 0, :, start:stop].diagonal(dim1=-2, dim2=-1).zero_()
            mask = self.mask[..., : window or stop]
        else:
            self.allowed[:, :, start:stop].diagonal(dim1=-2, dim2=-1).fill_(True)
            allowed, of_columns = (one[..., : window or stop] for one in (self.allowed, self.of_columns))
            mask = self.decoder.mask(allowed, self.ends + self.depth, of_columns)
        self.decoder.cache.place(slice(start, stop) if window is None else places[0], stop)
        self.depth += 1
        return self.decoder.forward(self.decoder.computed(tokens), places, mask)


def extend_with_branches(
    decoder: CachedModel,
    tokens: torch.LongTensor,  # (batch_size, M)
    starts: list[int],  # columns of the first of these
    forks: torch.LongTensor,  # (batch_size, N), how many first columns a branch sees, also those of this pass
    branches: torch.LongTensor,  # (batch_size, N, T)
    base: int,  # their first column
) -> torch.Tensor:
    """Feeds tokens and whole branches in one pass. Returns the branches' raw logits `(batch_size, N, T, size)`."""
    tokens, starts, forks, branches = map(decoder.computed, (tokens, starts, forks, branches))
    device, (rows, count, depth) = forks.device, branches.shape
    stop = base + count * depth
    width = decoder.columns_seen(stop, depth)
    columns = from_host(starts, device)[:, None] + torch.arange(tokens.shape[1], device=device)
    positions = (forks[:, :, None] + torch.arange(depth, device=device)).flatten(1)
    allowed = masks.visible_up_to(torch.cat([columns, forks.repeat_interleave(depth, dim=1) - 1], dim=1), width)
    allowed[:, tokens.shape[1] :, base:stop] = masks.chains(count, depth, device)
    places = torch.cat([columns, torch.arange(base, stop, device=device).expand(rows, -1)], dim=1)
    of_columns = torch.arange(width, device=device).repeat(rows, 1)
    of_columns[:, base:stop] = positions
    of_queries = torch.cat([columns, positions], dim=1)
    mask = decoder.mask(allowed, of_queries, of_columns[:, None])
    decoder.cache.place(places, width)
    fed = torch.cat([tokens, branches.flatten(1)], dim=1)
    kept = torch.arange(tokens.shape[1], fed.shape[1], device=device)
    logits = decoder.forward(fed, torch.stack([places, decoder.positions(of_queries)]), mask, kept)
    return logits.unflatten(1, (count, depth))
