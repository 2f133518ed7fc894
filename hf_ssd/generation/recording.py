"""Scores and logits of each generated token, in the form in which plain generation returns them."""

import torch


class StepRecord:
    """
    Collects what each row's tokens were chosen from, although rows advance by different amounts.

    Args:
        batch_size (`int`): Rows.
        prompt_length (`int`): Length of the rows before the first generated token.
    """

    def __init__(self, batch_size: int, prompt_length: int):
        self.prompt_length = prompt_length
        self.rows: list[list[torch.Tensor]] = [[] for _ in range(batch_size)]

    def add(self, values: torch.Tensor, counts: list[int]) -> None:
        """
        Args:
            values (`torch.FloatTensor` of shape `(batch_size, positions, vocab_size)`): One vector for each position.
            counts (`list[int]`): How many positions of each row became tokens.
        """
        for row, (value, count) in enumerate(zip(values, counts)):
            self.rows[row].extend(value[:count].clone())

    def up_to(self, length: int) -> tuple[torch.Tensor, ...]:
        """
        Returns one tensor of shape `(batch_size, vocab_size)` for each generated token of rows of the given length.
        Where a row has fewer tokens, there are zeros.
        """
        steps = length - self.prompt_length
        blank = torch.zeros_like(next(row[0] for row in self.rows if row))
        return tuple(torch.stack([row[i] if i < len(row) else blank for row in self.rows]) for i in range(steps))
