"""The user's own fallback: an object that proposes tokens after a miss."""

import inspect

import torch

from .base import Proposal, Proposer


class CustomFallback(Proposer):
    """
    Asks an object of the user for tokens, row by row. It is of either kind:

    - An object with `propose(input_ids, lookahead) -> (tokens, probabilities)`. `input_ids` has shape `(1, length)`;
      `tokens` has shape `(n,)` or `(1, n)`, where n may be 0 and tokens beyond `lookahead` are cut; `probabilities` has
      shape `(n, vocab_size)` or `(1, n, vocab_size)` and holds the distribution that each token was drawn from, or is
      `None` for point masses, which is always right.
    - A transformers `CandidateGenerator` that needs no outputs of the target. If it returns logits, its tokens must
      have been drawn from their softmax.
    """

    def __init__(self, proposer, vocab_size: int):
        check_proposer(proposer)
        self.proposer, self.vocab_size = proposer, vocab_size
        self.has_propose = _has(proposer, "propose", None, 1)
        self.name = f"The fallback {type(proposer).__name__}"

    def propose(self, texts: list[list[int]], rows: list[int], lookahead: int) -> list[Proposal]:
        return [self._ask(torch.tensor([texts[row]]), lookahead) for row in rows]

    def _ask(self, known: torch.LongTensor, lookahead: int) -> Proposal:
        """Returns the proposal for a row of known tokens `(1, length)`."""
        if self.has_propose:
            tokens, probabilities = self._pair(self.proposer.propose(known, lookahead))
            return self._checked(tokens.cpu(), probabilities, lookahead)
        candidates, logits = self._pair(self.proposer.get_candidates(known.clone()))  # it may write to its argument
        candidates, length = candidates.cpu(), known.shape[1]
        if candidates.dim() != 2 or not torch.equal(candidates[:, :length], known):
            raise ValueError(f"{self.name} returned candidates that do not begin with the given `input_ids`.")
        probabilities = None if logits is None else logits.float().softmax(dim=-1)
        return self._checked(candidates[:, length:], probabilities, lookahead)

    def _pair(self, answer) -> tuple[torch.Tensor, torch.Tensor | None]:
        if isinstance(answer, (tuple, list)) and len(answer) == 2 and isinstance(answer[0], torch.Tensor):
            if answer[1] is None or isinstance(answer[1], torch.Tensor):
                return answer
        raise TypeError(f"{self.name} must return two things: a tensor of tokens, and a tensor or None.")

    def _checked(self, tokens: torch.Tensor, probabilities: torch.Tensor | None, lookahead: int) -> Proposal:
        """Returns the proposal after checking it: an unnoticed mistake would change the output distribution."""
        count = tokens.shape[-1] if tokens.dim() else -1
        if tuple(tokens.shape) not in ((count,), (1, count)):
            raise ValueError(f"{self.name} returned tokens of shape {tuple(tokens.shape)}, not (n,) or (1, n).")
        if count == 0:
            return Proposal([])
        if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            raise TypeError(f"{self.name} returned tokens of type {tokens.dtype}, not integers.")
        tokens = tokens.flatten()[:lookahead].long()
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise ValueError(f"{self.name} returned tokens outside the vocabulary of {self.vocab_size} tokens.")
        if probabilities is None:
            return Proposal(tokens.tolist())
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
        return Proposal(tokens.tolist(), probabilities / total)


def check_proposer(value) -> None:
    """Raises `TypeError` if [`CustomFallback`] cannot use this object."""
    needs_target = getattr(value, "requires_model_outputs", False)
    if not _has(value, "propose", None, 1) and (needs_target or not _has(value, "get_candidates", None)):
        raise TypeError(
            f"`fallback` is a {type(value).__name__}, which cannot propose tokens by itself; give an object with "
            "propose(input_ids, lookahead), or a CandidateGenerator that needs no outputs of the target."
        )


def _has(value, name: str, *arguments) -> bool:
    """Whether the object has a method of this name that takes these arguments."""
    try:
        inspect.signature(getattr(value, name, None)).bind(*arguments)
    except TypeError:  # no method of this name, or it takes other arguments
        return False
    except ValueError:  # compiled, without a signature
        pass
    return True
