"""Random tokens of the text."""

import torch

from ...noise import FALLBACK, Noise, places
from .base import Proposal, Proposer


class RandomFallback(Proposer):
    """
    Proposes tokens drawn at random from the row's own text, each with its relative frequency there. It therefore never
    proposes ids that the tokenizer lacks, for which a model may have no sound embedding. The tokens depend on the text,
    the seed and the row alone, so they are the same whichever rows ask together, and however often.
    """

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
