"""Random tokens of the text."""

import numpy as np
import torch

from ...drafting.sampling import RANDOM_FALLBACK
from .base import Proposal, Proposer


class RandomFallback(Proposer):
    """
    Proposes tokens drawn at random from the row's own text, each with its relative frequency there. It therefore never
    proposes ids that the tokenizer lacks, for which a model may have no sound embedding. The tokens depend on the text,
    the seed and the row alone, so they are the same whichever rows ask together, and however often.
    """

    def __init__(self, vocab_size: int, seed: int):
        self.vocab_size, self.seed = vocab_size, seed

    def propose(self, texts: list[list[int]], rows: list[int], lookahead: int) -> list[Proposal]:
        # numpy rather than torch: `torch.randint` takes 32 random bits modulo the length, which favours early places,
        # and its CPU generator keeps 32 bits of a seed. Here the seed is a cipher's key, and row and position are its
        # counter, so no two places share numbers. They share none with the draft's noise either, whose counter differs
        # in its second word. numpy draws integers without bias, by rejection.
        proposals = []
        for row in rows:
            text = torch.tensor(texts[row])
            noise = np.random.Philox(key=self.seed, counter=[0, RANDOM_FALLBACK, row, len(text)])
            places = np.random.Generator(noise).integers(len(text), size=lookahead)
            shares = torch.bincount(text, minlength=self.vocab_size).float() / len(text)
            proposals.append(Proposal(text[torch.from_numpy(places)].tolist(), shares.expand(lookahead, -1)))
        return proposals
