"""The speculation cache: from a verification outcome to the speculation that was prepared for it."""

from dataclasses import dataclass

import torch


@dataclass
class Speculation:
    """
    What the target verifies next.

    Args:
        tokens (`torch.LongTensor` of shape `(batch_size, lookahead)`): The drafted tokens.
        probabilities (`torch.FloatTensor` of shape `(batch_size, lookahead, vocab_size)`, *optional*): The distribution
            each was drawn from; `None` if the most likely token was taken.
        hits (`torch.BoolTensor` of shape `(batch_size,)`): Whether a row's speculation came from the
            cache. On the CPU.
    """

    tokens: torch.LongTensor
    probabilities: torch.FloatTensor | None
    hits: torch.BoolTensor


class SpeculationCache:
    """
    The speculations prepared in one round, one for each of N outcomes of each row. They grow together, token by token,
    and may be looked up at any length.

    Args:
        accepted, bonus (`torch.LongTensor` of shape `(batch_size, N)`): Accepted count and bonus token of each outcome.
    """

    def __init__(self, accepted: torch.LongTensor, bonus: torch.LongTensor):
        self.accepted, self.bonus = accepted, bonus
        self.tokens: list[torch.LongTensor] = []
        self.probabilities: list[torch.FloatTensor] = []

    def append(self, tokens: torch.LongTensor, probabilities: torch.FloatTensor | None) -> None:
        """Adds the next token `(batch_size, N)` of every speculation, and its distribution `(batch_size, N, vocab)`."""
        self.tokens.append(tokens)
        if probabilities is not None:
            self.probabilities.append(probabilities)

    def lookup(self, accepted: torch.LongTensor, bonus: torch.LongTensor) -> Speculation:
        """
        Finds the speculation for the outcome of each row.

        Args:
            accepted, bonus (`torch.LongTensor` of shape `(batch_size,)`): The outcomes.

        Returns:
            [`Speculation`], whose rows without a hit hold something that means nothing.
        """
        matches = (self.accepted == accepted[:, None]) & (self.bonus == bonus[:, None])
        hits, index = matches.any(1), matches.int().argmax(1)
        rows = torch.arange(len(index), device=index.device)
        if not self.tokens:
            return Speculation(bonus.new_zeros(len(index), 0), None, hits.cpu())
        tokens = torch.stack([step[rows, index] for step in self.tokens], dim=1)
        probabilities = None
        if self.probabilities:
            probabilities = torch.stack([step[rows, index] for step in self.probabilities], dim=1)
        return Speculation(tokens, probabilities, hits.cpu())
