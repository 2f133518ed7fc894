"""What takes the draft model's place after a miss: proposers that need no forward pass.

Whatever a fallback proposes, the output stays the target's, because a proposal says which distribution its tokens were
drawn from. The draft model itself (the paper's primary speculator) drafts just in time, see [`Drafter`].
"""

import dataclasses
from abc import ABC, abstractmethod

import numpy as np
import torch

from ..devices import from_host
from ..rounds import NGRAM, RANDOM, Speculation
from .sampling import RANDOM_FALLBACK


def padded(tokens: list[list[int]], width: int) -> list[list[int]]:
    """Returns so many tokens of each row, with token 0 behind those that are too few."""
    return [row[:width] + [0] * (width - len(row)) for row in tokens]


def point_masses(tokens: torch.LongTensor, vocab_size: int) -> torch.FloatTensor:
    """Returns distributions `(..., vocab_size)` in which each of the tokens `(...)` is certain."""
    empty = torch.zeros(*tokens.shape, vocab_size, dtype=torch.float32, device=tokens.device)
    return empty.scatter_(-1, tokens[..., None], 1.0)


class Fallback(ABC):
    """Proposes the next tokens of rows whose outcome had not been prepared."""

    @abstractmethod
    def propose(self, ids: torch.LongTensor, lengths: list[int], rows: list[int], lookahead: int) -> Speculation:
        """
        Args:
            ids (`torch.LongTensor` of shape `(batch_size, capacity)`): The verified tokens of each row, prompt and
                output, without padding in front. It is not written to.
            lengths (`list[int]`): How many tokens of each row are verified. The proposal starts at that position.
            rows (`list[int]`): The rows that need a proposal, in the order of the answer.
            lookahead (`int`): The largest number of tokens to propose.

        Returns:
            [`~hf_ssd.rounds.Speculation`]: The tokens of each of these rows, and what they were drawn from `(rows,
            width, vocab_size)`, `None` for point masses. Where a row has fewer than `width` tokens, token 0 is certain.
        """


class NGramFallback(Fallback):
    """
    Proposes what followed the last tokens when they occurred before, in the prompt or in the output (prompt lookup,
    Saxena, 2023). The longest match wins, and of several the latest; without any nothing is proposed.

    Args:
        max_ngram (`int`, *optional*, defaults to 8): The most tokens that are compared.
    """

    def __init__(self, max_ngram: int = 8):
        self.max_ngram = max_ngram

    def propose(self, ids: torch.LongTensor, lengths: list[int], rows: list[int], lookahead: int) -> Speculation:
        if not rows:
            return Speculation([])
        width = max(lengths[row] for row in rows)
        known = from_host([lengths[row] for row in rows], ids.device)[:, None]
        history = ids[:, :width].index_select(0, from_host(rows, ids.device)).int()
        positions = torch.arange(width, device=ids.device)

        # 1. For each position, how many tokens up to and with it equal the last tokens of the row. All positions take
        #    one more step back together, until no match is left. The last position itself is no earlier occurrence.
        #    Integers, not booleans: on a CPU torch compares 65,536 numbers into int32 in 4 us, into bool in 23 us.
        steps = torch.arange(min(self.max_ngram, width), device=ids.device)
        suffix = history.gather(1, (known - 1 - steps).clamp(min=0))
        matched = torch.zeros_like(history)
        alive = (positions < known - 1).int()
        for back in range(len(steps)):
            stepped = history[:, : width - back]
            alive = alive[:, min(back, 1) :] & torch.eq(stepped, suffix[:, back, None], out=torch.empty_like(stepped))
            if ids.device.type == "cpu" and not alive.max():  # to look at it, one would have to wait for a GPU
                break
            matched[:, back:] += alive

        # 2. Of the longest matches the latest: both at once in one number.
        best = torch.add(positions, matched, alpha=width).amax(dim=1, keepdim=True)
        start = torch.where(best >= width, best % width + 1, known)

        # 3. What followed it, as far as it is known.
        columns = start + torch.arange(lookahead, device=ids.device)
        tokens, counts = history.gather(1, columns.clamp(max=width - 1)), (known - start).clamp(max=lookahead)
        return Speculation([row[1 : 1 + row[0]] for row in torch.cat([counts, tokens], dim=1).tolist()])


class RandomFallback(Fallback):
    """
    Proposes tokens drawn at random from the row's own text, each with the share that it has there. So it proposes none
    that the tokenizer lacks, of which a model may have no sound embedding. They are a function of the text, the seed
    and the row, so it does not matter which rows ask together, or how often.

    Args:
        vocab_size (`int`): Number of tokens.
        seed (`int`): Between 0 and 2^128 - 1.
    """

    def __init__(self, vocab_size: int, seed: int):
        self.vocab_size, self.seed = vocab_size, seed

    def propose(self, ids: torch.LongTensor, lengths: list[int], rows: list[int], lookahead: int) -> Speculation:
        # numpy rather than torch: `torch.randint` takes 32 random bits modulo the length, which favours early places,
        # and its CPU generator keeps 32 bits of a seed. Here the seed is a cipher's key, row and position are its
        # counter, so no two places share numbers, nor does one with the draft's noise, which has the same key; and what
        # does not divide evenly is drawn again.
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


def join(
    ready: Speculation, missed: list[int], proposal: Speculation, lookahead: int, vocab_size: int, device=None
) -> Speculation:
    """
    Gives the rows that missed what a fallback proposes for them; the others keep what is ready.

    Args:
        ready ([`~hf_ssd.rounds.Speculation`]): What was prepared, and what it was drawn from.
        missed (`list[int]`): The rows that the proposal is for, at least one.
        proposal ([`~hf_ssd.rounds.Speculation`]): Of these rows.
        lookahead (`int`): What was asked of the fallback.
        vocab_size (`int`): Number of tokens.
        device (`torch.device`, *optional*): Where to tell what tokens were drawn from, if that matters.

    Returns:
        [`~hf_ssd.rounds.Speculation`]: At most `lookahead` tokens or, if no row hit, as many as the longest row of the
        proposal. A row of the proposal that is shorter has token 0 behind.
    """
    hit = any(ready.record.hits)
    width = lookahead if hit else proposal.width
    proposed, tokens = padded(proposal.tokens, width), [row[:width] for row in ready.tokens]
    for row, of_row in zip(missed, proposed):
        tokens[row] = of_row
    probabilities = None
    if device is not None:
        rows = from_host(missed, device)
        probabilities = torch.zeros(len(tokens), width, vocab_size, dtype=torch.float32, device=device)
        probabilities[..., 0] = 1.0  # of rows that are finished
        if hit and ready.probabilities is not None:  # otherwise no branch has grown yet
            grown = min(width, ready.probabilities.shape[1])
            probabilities[:, :grown] = ready.probabilities[:, :grown]
        if proposal.probabilities is not None:
            probabilities[rows] = from_host(proposal.probabilities[:, :width], device)
        else:
            probabilities[rows] = point_masses(from_host(proposed, device), vocab_size)
    return dataclasses.replace(ready, tokens=tokens, probabilities=probabilities, support=None)


def fallbacks_for(vocab_size: int, seed: int) -> dict[str, Fallback]:
    """Returns the fallbacks that a plan can name."""
    return {NGRAM: NGramFallback(), RANDOM: RandomFallback(vocab_size, seed)}
