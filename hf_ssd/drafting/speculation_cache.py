"""The speculation cache: from a verification outcome to the speculation that was prepared for it."""

import torch


class SpeculationCache:
    """
    The speculations prepared in one round, one for each of N outcomes of each row. They grow together, and may be
    looked up at any length.

    Args:
        accepted, bonus (`torch.LongTensor` of shape `(batch_size, N)`): Accepted count and bonus token of each outcome.
    """

    def __init__(self, accepted: torch.LongTensor, bonus: torch.LongTensor):
        self.accepted, self.bonus = accepted, bonus
        self.tokens: list[torch.LongTensor] = []
        self.probabilities: list[torch.FloatTensor] = []

    def append(self, tokens: torch.LongTensor, probabilities: torch.FloatTensor | None) -> None:
        """
        Adds the next T tokens of every speculation, `(batch_size, N, T)`, and their distributions `(batch_size, N, T,
        vocab_size)`.
        """
        self.tokens.append(tokens)
        if probabilities is not None:
            self.probabilities.append(probabilities)

    def lookup(self, accepted: torch.LongTensor, bonus: torch.LongTensor):
        """
        Finds the speculation for the outcome of each row.

        Args:
            accepted, bonus (`torch.LongTensor` of shape `(batch_size,)`): The outcomes.

        Returns:
            Tokens `(batch_size, lookahead)`, their distributions or `None`, and of each row which of the N outcomes it
            was, -1 for a miss. Rows without a hit hold something that means nothing.
        """
        matches = (self.accepted == accepted[:, None]) & (self.bonus == bonus[:, None])
        hits, index = matches.any(1), matches.int().argmax(1)
        found, rows = torch.where(hits, index, -1).tolist(), torch.arange(len(index), device=index.device)
        if not self.tokens:
            return bonus.new_zeros(len(index), 0), None, found
        tokens = torch.cat([part[rows, index] for part in self.tokens], dim=1)
        probabilities = None
        if self.probabilities:
            probabilities = torch.cat([part[rows, index] for part in self.probabilities], dim=1)
        return tokens, probabilities, found
