"""Fallbacks, which propose tokens in the draft model's place after a miss, without a forward pass.

A fallback never changes the output distribution, because a proposal includes the distributions that its tokens were
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
    """Returns the first `width` tokens of each row. Shorter rows are filled with token 0."""
    return [row[:width] + [0] * (width - len(row)) for row in tokens]


def point_masses(tokens: torch.LongTensor, vocab_size: int) -> torch.FloatTensor:
    """Returns distributions `(..., vocab_size)` in which each of the tokens `(...)` is certain."""
    empty = torch.zeros(*tokens.shape, vocab_size, dtype=torch.float32, device=tokens.device)
    return empty.scatter_(-1, tokens[..., None], 1.0)


class Fallback(ABC):
    """
    Proposes the next tokens of rows whose outcome had not been prepared.

    Attributes:
        reads_features (`bool`): Class attribute: whether the target's features are for the fallback, not the draft.
    """

    reads_features = False

    def take_in(self, outcome, plan, features) -> None:
        """Is told of each outcome, for fallbacks in the target's process. See [`DraftSession.send_outcome`]."""

    def verify(self, tokens: list[list[int]], sources: list[str]) -> None:
        """Is told which tokens are verified next, and the sources of the rows."""

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
            [`~hf_ssd.rounds.Speculation`]: The tokens of each of these rows, and the distributions `(rows, width,
            vocab_size)` that they were drawn from, `None` for point masses. Where a row has fewer than `width` tokens,
            token 0 is certain.
        """


class NGramFallback(Fallback):
    """
    Finds an earlier occurrence of the last tokens in the prompt or the output, and proposes the tokens that followed it
    (prompt lookup, Saxena, 2023). The longest match wins, and the latest of several longest matches. Without a match
    nothing is proposed.

    Args:
        max_ngram (`int`, *optional*, defaults to 8): The largest number of tokens that are compared.
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

        # 1. Count, for each position, the tokens up to and including it that equal the last tokens of the row. All
        #    positions step back together, until no match is left. The last position itself is no earlier occurrence.
        #    Integers, not booleans: on a CPU torch compares 65,536 numbers into int32 in 4 us, into bool in 23 us.
        steps = torch.arange(min(self.max_ngram, width), device=ids.device)
        suffix = history.gather(1, (known - 1 - steps).clamp(min=0))
        matched = torch.zeros_like(history)
        alive = (positions < known - 1).int()
        for back in range(len(steps)):
            stepped = history[:, : width - back]
            alive = alive[:, min(back, 1) :] & torch.eq(stepped, suffix[:, back, None], out=torch.empty_like(stepped))
            if ids.device.type == "cpu" and not alive.max():  # on a GPU the check would synchronize
                break
            matched[:, back:] += alive

        # 2. Find the latest of the longest matches. Length and position are combined into a single number.
        best = torch.add(positions, matched, alpha=width).amax(dim=1, keepdim=True)
        start = torch.where(best >= width, best % width + 1, known)

        # 3. Gather the known tokens that followed the match.
        columns = start + torch.arange(lookahead, device=ids.device)
        tokens, counts = history.gather(1, columns.clamp(max=width - 1)), (known - start).clamp(max=lookahead)
        return Speculation([row[1 : 1 + row[0]] for row in torch.cat([counts, tokens], dim=1).tolist()])


class RandomFallback(Fallback):
    """
    Proposes tokens drawn at random from the row's own text, each with its relative frequency there. It therefore never
    proposes ids that the tokenizer lacks, for which a model may have no sound embedding. The tokens depend on the text,
    the seed and the row alone, so they are the same whichever rows ask together, and however often.

    Args:
        vocab_size (`int`): Number of tokens.
        seed (`int`): Between 0 and 2^128 - 1.
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


def join(
    ready: Speculation, missed: list[int], proposal: Speculation, lookahead: int, vocab_size: int, device=None
) -> Speculation:
    """
    Gives the rows that missed the tokens that a fallback proposes for them. Other rows keep their prepared tokens.

    Args:
        ready ([`~hf_ssd.rounds.Speculation`]): The prepared tokens and their distributions.
        missed (`list[int]`): The rows that the proposal is for. Not empty.
        proposal ([`~hf_ssd.rounds.Speculation`]): The proposal for these rows, in this order.
        lookahead (`int`): The largest number of tokens that the fallback was asked for.
        vocab_size (`int`): Number of the target's tokens.
        device (`torch.device`, *optional*): Device of the resulting distributions. None are returned by default, as is
            right when tokens are not sampled.

    Returns:
        [`~hf_ssd.rounds.Speculation`]: At most `lookahead` tokens of each row or, if no row hit, as many as the longest
        row of the proposal. Shorter rows of the proposal are filled with token 0.
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
        probabilities[..., 0] = 1.0  # for rows that are finished
        if hit and ready.probabilities is not None:  # `None` if no branch has grown yet
            grown = min(width, ready.probabilities.shape[1])
            probabilities[:, :grown] = ready.probabilities[:, :grown]
        if proposal.probabilities is not None:
            probabilities[rows] = from_host(proposal.probabilities[:, :width], device)
        else:
            probabilities[rows] = point_masses(from_host(proposed, device), vocab_size)
    return dataclasses.replace(ready, tokens=tokens, probabilities=probabilities, support=None)


def fallbacks_for(vocab_size: int, seed: int) -> dict[str, Fallback]:
    """Returns the fallbacks that a plan can name, by their names."""
    return {NGRAM: NGramFallback(), RANDOM: RandomFallback(vocab_size, seed)}
