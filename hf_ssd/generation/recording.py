"""Scores and logits of each generated token, in the form in which plain generation returns them."""

import torch


class StepRecord:
    """
    Collects the scores or logits that each row's tokens were chosen from. Rows may advance by different amounts.

    Args:
        batch_size (`int`): Rows.
        prompt_length (`int`): Length of the rows before the first generated token.
        device (`torch.device`): Where the vectors are kept.
        dtype (`torch.dtype`, *optional*): Their type; by default that of the values that are added.
    """

    def __init__(self, batch_size: int, prompt_length: int, device: torch.device, dtype: torch.dtype | None = None):
        self.prompt_length, self.device, self.dtype = prompt_length, device, dtype
        self.rows: list[list[torch.Tensor]] = [[] for _ in range(batch_size)]

    def add(self, row: int, values: torch.Tensor) -> None:
        """
        Adds vectors to a row.

        Args:
            row (`int`): The row.
            values (`torch.Tensor` of shape `(new_tokens, vocab_size)`): A vector for each of its new tokens.
        """
        self.rows[row].extend(values.to(device=self.device, dtype=self.dtype or values.dtype, copy=True))

    def up_to(self, length: int) -> tuple[torch.Tensor, ...]:
        """
        Returns a tensor of shape `(batch_size, vocab_size)` for each generated token of rows of the given length. Rows
        with fewer tokens have zeros there.
        """
        steps = length - self.prompt_length
        blank = torch.zeros_like(next(row[0] for row in self.rows if row))
        return tuple(torch.stack([row[i] if i < len(row) else blank for row in self.rows]) for i in range(steps))
