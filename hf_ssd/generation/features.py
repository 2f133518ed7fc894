"""The target's hidden states at the tokens of each row, for a draft that reads them."""

import torch

from ..devices import from_host
from .sequences import kept_columns

ROOM = 256  # columns by which the storage grows


class Features:
    """
    The features of a token are the hidden states of some layers of the target, side by side, from the pass that was fed
    the token. So the last token of a row, which is not fed yet, has none. All features of a call are kept, because a
    draft may join late.

    The prompts' states `(batch_size, tokens, width)` end with their last tokens. The padded prompts have `length`
    columns; tokens that the user's cache held before the call have zeros.
    """

    def __init__(self, prompts: torch.Tensor, attention_mask: torch.Tensor | None, length: int):
        rows, fed, width = prompts.shape
        everything = torch.ones(rows, length, dtype=torch.bool)
        kept = everything if attention_mask is None else kept_columns(attention_mask, length).cpu()
        self.lengths = kept.sum(1).tolist()  # tokens of each row that have features
        # The features (batch_size, capacity, width) of each row, without padding.
        self.rows = prompts.new_zeros(rows, max(self.lengths) + ROOM, width)
        for row, columns in enumerate(kept):
            places = columns.nonzero()[:, 0]
            places = places[places >= length - fed]
            end = self.lengths[row]
            self.rows[row, end - len(places) : end] = prompts[row, from_host(places - (length - fed), prompts.device)]
        self.rows.nan_to_num_(0.0, 0.0, 0.0)

    def add(self, features: torch.Tensor, accepted: list[int]) -> None:
        """
        Takes in the hidden states `(batch_size, lookahead + 1, width)` of the last token of each row and of its drafted
        tokens, of which it has `accepted` some, a negative number if it is finished.
        """
        count, ends = features.shape[1], max(self.lengths) + features.shape[1]
        if ends > self.rows.shape[1]:
            more = self.rows.new_zeros(len(self.rows), max(ROOM, ends - self.rows.shape[1]), self.rows.shape[2])
            self.rows = torch.cat([self.rows, more], dim=1)
        columns = from_host(self.lengths, self.rows.device)[:, None] + torch.arange(count, device=self.rows.device)
        order = torch.arange(len(self.rows), device=self.rows.device)[:, None]
        # Columns of rejected tokens are written again before they are read.
        self.rows[order, columns] = features.to(self.rows).nan_to_num(0.0, 0.0, 0.0)
        self.lengths = [n + max(0, k + 1) for n, k in zip(self.lengths, accepted)]

    def between(self, starts: list[int], ends: list[int]) -> torch.Tensor:
        """Returns features `(tokens, width)`: those of each row from token `starts` to `ends`, row after row."""
        return torch.cat([of_row[start:end] for of_row, start, end in zip(self.rows, starts, ends)])
