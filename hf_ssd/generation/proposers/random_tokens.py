"""Random tokens of the text."""

import numpy as np
import torch

from ...devices import from_host
from ...drafting.sampling import RANDOM_FALLBACK
from ...rounds import Speculation
from .base import Proposer


class RandomFallback(Proposer):
    """
    Proposes tokens drawn at random from the row's own text, each with its relative frequency there. It therefore never
    proposes ids that the tokenizer lacks, for which a model may have no sound embedding. The tokens depend on the text,
    the seed and the row alone, so they are the same whichever rows ask together, and however often.
    """

    def __init__(self, vocab_size: int, seed: int):
        self.vocab_size, self.seed = vocab_size, seed

    def propose(self, ids: torch.LongTensor, lengths: list[int], rows: list[int], lookahead: int) -> Speculation:
        # numpy rather than torch: `torch.randint` takes 32 random bits modulo the length, which favours early places,
        # and its CPU generator keeps 32 bits of a seed. Here the seed is a cipher's key, and row and position are its
        # counter, so no two places share numbers. They share none with the draft's noise either, whose counter differs
        # in its second word. numpy draws integers without bias, by rejection.
        drawn = np.zeros((len(rows), lookahead), dtype=np.int64)
        for place, row in enumerate(rows):
            noise = np.random.Philox(key=self.seed, counter=[0, RANDOM_FALLBACK, row, lengths[row]])
            drawn[place] = np.random.Generator(noise).integers(lengths[row], size=lookahead)
        known = from_host([[lengths[row]] for row in rows], ids.device)
        text = ids.index_select(0, from_host(rows, ids.device))[:, : max(lengths[row] for row in rows)]
        shares = torch.where(torch.arange(text.shape[1], device=ids.device) < known, 1 / known, 0.0).float()
        nothing = torch.zeros(len(rows), self.vocab_size, dtype=torch.float32, device=ids.device)
        shares = nothing.scatter_add_(1, text, shares)
        tokens = text.gather(1, from_host(torch.from_numpy(drawn), ids.device)).tolist()
        return Speculation(tokens, shares[:, None].expand(-1, lookahead, -1))
