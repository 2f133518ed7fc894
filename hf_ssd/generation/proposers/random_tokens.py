"""Random tokens of the text."""

import torch

from ...noise import FALLBACK, Noise, places
from .base import Proposal, Proposer


class RandomFallback(Proposer):
    """Draws tokens from the row's own text, all of which a model knows. They depend on text, seed and row alone."""

    def __init__(self, vocab_size: int, seed: int):
        self.vocab_size, self.noise = vocab_size, Noise(seed, vocab_size)

    def propose(self, texts: list[list[int]], rows: list[int], lookahead: int) -> list[Proposal]:
        proposals = []
        for row in rows:
            text = torch.tensor(texts[row])
            uniform = self.noise.uniform(places(FALLBACK, torch.tensor(row), len(text), torch.arange(lookahead)))
            drawn = text[(uniform * len(text)).long().clamp(max=len(text) - 1)]  # a product may be rounded up
            shares = torch.bincount(text, minlength=self.vocab_size).float() / len(text)
            proposals.append(Proposal(drawn.tolist(), shares.expand(lookahead, -1)))
        return proposals
