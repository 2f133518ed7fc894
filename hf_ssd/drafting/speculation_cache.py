"""The speculation cache: from a verification outcome to the speculation that was prepared for it."""

import torch


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

    def lookup(self, accepted: torch.LongTensor, bonus: torch.LongTensor):
        """
        Finds the speculation for the outcome of each row.

        Args:
            accepted, bonus (`torch.LongTensor` of shape `(batch_size,)`): The outcomes.

        Returns:
            Tokens `(batch_size, lookahead)`, their distributions or `None`, and which rows hit, on the CPU. Rows
            without a hit hold something that means nothing.
        """
        matches = (self.accepted == accepted[:, None]) & (self.bonus == bonus[:, None])
        hits, index = matches.any(1), matches.int().argmax(1)
        rows = torch.arange(len(index), device=index.device)
        if not self.tokens:
            return bonus.new_zeros(len(index), 0), None, hits.cpu()
        tokens = torch.stack([step[rows, index] for step in self.tokens], dim=1)
        probabilities = None
        if self.probabilities:
            probabilities = torch.stack([step[rows, index] for step in self.probabilities], dim=1)
        return tokens, probabilities, hits.cpu()
