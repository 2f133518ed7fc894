"""Scores and logits of each generated token, in the form in which plain generation returns them."""

import torch

from .sequences import Sequences


class StepRecord:
    """Collects the scores or logits that each row's tokens were chosen from. Rows may advance by different amounts."""

    def __init__(self, sequences: Sequences, dtype: torch.dtype | None = None):
        self.prompt_length, self.device, self.dtype = sequences.prompt_length, sequences.ids.device, dtype
        self.rows: list[list[torch.Tensor]] = [[] for _ in range(sequences.batch_size)]

    def add(self, row: int, values: torch.Tensor) -> None:
        """Adds a vector for each new token of a row, `(new_tokens, vocab_size)`."""
        self.rows[row].extend(values.to(device=self.device, dtype=self.dtype or values.dtype, copy=True))

    def up_to(self, length: int) -> tuple[torch.Tensor, ...]:
        """Returns a tensor `(batch_size, vocab_size)` for each token up to a length, with zeros for shorter rows."""
        steps = length - self.prompt_length
        blank = torch.zeros_like(next(row[0] for row in self.rows if row))
        return tuple(torch.stack([row[i] if i < len(row) else blank for row in self.rows]) for i in range(steps))
