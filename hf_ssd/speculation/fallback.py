"""Cheap proposers for a miss: what to verify next when the outcome that came had not been prepared.

The draft model itself can draft just in time (the paper's primary speculator, see [`Speculator`]); the *backups* here
answer without a forward pass. Whatever a backup proposes, the output stays the target's, because a proposal says which
distribution its tokens were drawn from.
"""

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from ..devices import from_host
from .sampling import RANDOM_BACKUP


@dataclass
class Proposal:
    """
    What a backup proposes for some rows.

    Args:
        tokens (`torch.LongTensor` of shape `(rows, width)`): The proposed tokens of each row, then filler.
        counts (`list[int]`): How many of each row's tokens are proposed, at most `width`. The rest is filler, token 0.
        probabilities (`torch.FloatTensor` of shape `(rows, width, vocab_size)`, *optional*): The distribution each
            token was drawn from, to be read and not written to; `None` is a point mass on each token. Filler counts
            as a point mass too.
    """

    tokens: torch.LongTensor
    counts: list[int]
    probabilities: torch.FloatTensor | None = None


def dense_probabilities(proposal: Proposal, vocab_size: int) -> torch.FloatTensor:
    """Returns the probabilities of shape `(rows, width, vocab_size)`, in which a point mass is a one-hot row."""
    if proposal.probabilities is not None:
        return proposal.probabilities
    shape = (*proposal.tokens.shape, vocab_size)
    empty = torch.zeros(shape, dtype=torch.float32, device=proposal.tokens.device)
    return empty.scatter_(2, proposal.tokens[:, :, None], 1.0)


class Backup(ABC):
    """Proposes the next tokens of rows whose outcome had not been prepared."""

    @abstractmethod
    def propose(self, ids: torch.LongTensor, lengths: list[int], rows: list[int], lookahead: int) -> Proposal:
        """
        Args:
            ids (`torch.LongTensor` of shape `(batch_size, capacity)`): The verified tokens of each row, prompt and
                output, without padding in front. It is not written to.
            lengths (`list[int]`): How many tokens of each row are verified. The proposal starts at that position.
            rows (`list[int]`): The rows that need a proposal, in the order of the answer.
            lookahead (`int`): The largest number of tokens to propose, and the width of the answer.

        Returns:
            [`Proposal`].
        """


class NGramBackup(Backup):
    """
    Proposes what followed the last tokens when they occurred before, in the prompt or in the output (prompt lookup,
    Saxena, 2023). The longest match wins, and of several the latest; without any nothing is proposed.

    Args:
        max_ngram (`int`, *optional*, defaults to 8): The most tokens that are compared.
    """

    def __init__(self, max_ngram: int = 8):
        self.max_ngram = max_ngram

    def propose(self, ids: torch.LongTensor, lengths: list[int], rows: list[int], lookahead: int) -> Proposal:
        if not rows:
            return Proposal(ids.new_zeros(0, lookahead), [])
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
        tokens = history.gather(1, columns.clamp(max=width - 1)).masked_fill(columns >= known, 0).long()
        return Proposal(tokens, (known - start).clamp(max=lookahead).flatten().tolist())


class RandomBackup(Backup):
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

    def propose(self, ids: torch.LongTensor, lengths: list[int], rows: list[int], lookahead: int) -> Proposal:
        # numpy rather than torch: `torch.randint` takes 32 random bits modulo the length, which favours early places,
        # and its CPU generator keeps 32 bits of a seed. Here the seed is a cipher's key, row and position are its
        # counter, so no two places share numbers, nor does one with the draft's noise, which has the same key; and what
        # does not divide evenly is drawn again.
        drawn = np.zeros((len(rows), lookahead), dtype=np.int64)
        for place, row in enumerate(rows):
            noise = np.random.Philox(key=self.seed, counter=[0, RANDOM_BACKUP, row, lengths[row]])
            drawn[place] = np.random.Generator(noise).integers(lengths[row], size=lookahead)
        known = from_host([[lengths[row]] for row in rows], ids.device)
        text = ids.index_select(0, from_host(rows, ids.device))[:, : max(lengths[row] for row in rows)]
        shares = torch.where(torch.arange(text.shape[1], device=ids.device) < known, 1 / known, 0.0).float()
        nothing = torch.zeros(len(rows), self.vocab_size, dtype=torch.float32, device=ids.device)
        shares = nothing.scatter_add_(1, text, shares)
        tokens = text.gather(1, from_host(torch.from_numpy(drawn), ids.device))
        return Proposal(tokens, [lookahead] * len(rows), shares[:, None].expand(-1, lookahead, -1))


class CustomBackup(Backup):
    """
    Asks an object of the user's, one row at a time.

    Args:
        proposer: One of two kinds.

            - An object with `propose(input_ids, lookahead) -> (tokens, probabilities)`. `input_ids` has shape
              `(1, length)`; `tokens` has shape `(n,)` or `(1, n)`, where n may be 0 and all beyond `lookahead` is cut;
              `probabilities` has shape `(n, vocab_size)` or `(1, n, vocab_size)` and is the distribution each token was
              drawn from, or `None` for point masses, which is always right.
            - A transformers `CandidateGenerator` that needs no outputs of the target, such as
              `PromptLookupCandidateGenerator`, whose `max_length` (20 by default) bounds where it looks. If it returns
              logits, its tokens must have been drawn from their softmax.
        vocab_size (`int`): Number of tokens.

    Raises:
        `TypeError`: `proposer` is neither, or it returns something of another type.
        `ValueError`: it returns tokens or probabilities that cannot be.
    """

    def __init__(self, proposer, vocab_size: int):
        check_proposer(proposer)
        self.proposer, self.vocab_size = proposer, vocab_size
        self.has_propose = _has(proposer, "propose", None, 1)
        self.name = f"The fallback {type(proposer).__name__}"

    def propose(self, ids: torch.LongTensor, lengths: list[int], rows: list[int], lookahead: int) -> Proposal:
        answers = [self._ask(ids[row : row + 1, : lengths[row]], lookahead) for row in rows]
        proposal = Proposal(ids.new_zeros(len(rows), lookahead), [len(tokens) for tokens, _ in answers])
        for place, (tokens, _) in enumerate(answers):
            proposal.tokens[place, : len(tokens)] = tokens
        if any(probabilities is not None for _, probabilities in answers):
            proposal.probabilities = dense_probabilities(proposal, self.vocab_size)
            for place, (tokens, probabilities) in enumerate(answers):
                if probabilities is not None:
                    proposal.probabilities[place, : len(tokens)] = probabilities
        return proposal

    def _ask(self, known: torch.LongTensor, lookahead: int) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        """Returns the tokens `(n,)` and probabilities `(n, vocab_size)` for one row of known tokens `(1, length)`."""
        input_ids = known.clone()  # whatever the object does with it, the verified tokens stay as they are
        if self.has_propose:
            tokens, probabilities = self._pair(self.proposer.propose(input_ids, lookahead))
            return self._checked(tokens.to(known.device), probabilities, lookahead)
        candidates, logits = self._pair(self.proposer.get_candidates(input_ids))
        candidates, length = candidates.to(known.device), known.shape[1]
        if candidates.dim() != 2 or not torch.equal(candidates[:, :length], known):
            raise ValueError(f"{self.name} returned candidates that do not begin with the given `input_ids`.")
        probabilities = None if logits is None else logits.float().softmax(dim=-1)
        return self._checked(candidates[:, length:], probabilities, lookahead)

    def _pair(self, answer) -> tuple[torch.Tensor, torch.Tensor | None]:
        if isinstance(answer, (tuple, list)) and len(answer) == 2 and isinstance(answer[0], torch.Tensor):
            if answer[1] is None or isinstance(answer[1], torch.Tensor):
                return answer
        raise TypeError(f"{self.name} must return two things: a tensor of tokens, and a tensor or None.")

    def _checked(self, tokens: torch.Tensor, probabilities: torch.Tensor | None, lookahead: int):
        """A mistake here would change what the target says, or surface far from the object that made it."""
        count = tokens.shape[-1] if tokens.dim() else -1
        if tuple(tokens.shape) not in ((count,), (1, count)):
            raise ValueError(f"{self.name} returned tokens of shape {tuple(tokens.shape)}, not (n,) or (1, n).")
        if count == 0:
            return tokens.flatten().long(), None
        if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            raise TypeError(f"{self.name} returned tokens of type {tokens.dtype}, not integers.")
        tokens = tokens.flatten()[:lookahead].long()
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise ValueError(f"{self.name} returned tokens outside the vocabulary of {self.vocab_size} tokens.")
        if probabilities is None:
            return tokens, None
        shape = (count, self.vocab_size)
        if tuple(probabilities.shape) not in (shape, (1, *shape)):
            found = tuple(probabilities.shape)
            raise ValueError(f"{self.name} returned probabilities of shape {found}, not {shape} or {(1, *shape)}.")
        probabilities = probabilities.to(tokens.device, torch.float32).reshape(shape)[:lookahead]
        if not probabilities.isfinite().all() or probabilities.min() < 0:
            raise ValueError(f"{self.name} returned probabilities that are negative or not finite.")
        total = probabilities.sum(dim=-1, keepdim=True)
        if (total - 1).abs().max() > 1e-3:
            raise ValueError(f"{self.name} returned probabilities that do not sum to 1.")
        if probabilities.gather(1, tokens[:, None]).min() == 0:
            raise ValueError(f"{self.name} returned a token that has probability 0, so it was not drawn from them.")
        return tokens, probabilities / total


def is_proposer(value) -> bool:
    """Whether [`CustomBackup`] can ask this object."""
    needs_target = getattr(value, "requires_model_outputs", False)
    return _has(value, "propose", None, 1) or (not needs_target and _has(value, "get_candidates", None))


def check_proposer(value) -> None:
    """
    Raises:
        `TypeError`: [`CustomBackup`] cannot ask this object.
    """
    if not is_proposer(value):
        raise TypeError(
            f"`fallback` is a {type(value).__name__}, which cannot propose tokens by itself; give an object with "
            "propose(input_ids, lookahead), or a CandidateGenerator that needs no outputs of the target."
        )


def _has(value, name: str, *arguments) -> bool:
    """Whether the object has this method, and it takes these arguments."""
    try:
        inspect.signature(getattr(value, name, None)).bind(*arguments)
    except TypeError:  # no such method, or not with these arguments
        return False
    except ValueError:  # compiled, without a signature
        pass
    return True
