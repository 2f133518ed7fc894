"""The interface of proposers in the target's process, and how their tokens join those of a draft."""

from abc import ABC, abstractmethod

import torch

from ...devices import from_host
from ...rounds import Outcome, Plan, Speculation


class Proposer(ABC):
    """
    Proposes the next tokens of rows whose outcome had not been prepared. It never changes the output distribution,
    because a proposal includes the distributions that its tokens were drawn from. A new proposer is a line in
    `PROPOSERS`.
    """

    def take_in(self, outcome: Outcome, plan: Plan, features: torch.Tensor | None) -> None:
        """Is told of each outcome that the draft is told of, with the target's features if the call reads them."""

    def take_speculation(self, tokens: list[list[int]], sources: list[str]) -> None:
        """Is told which tokens are verified next, and the sources of the rows."""

    @abstractmethod
    def propose(self, ids: torch.LongTensor, lengths: list[int], rows: list[int], lookahead: int) -> Speculation:
        """
        Args:
            ids (`torch.LongTensor` of shape `(batch_size, capacity)`): The verified tokens of each row, prompt and
                output, on the host, without padding in front. It is not written to.
            lengths (`list[int]`): How many tokens of each row are verified. The proposal starts at that position.
            rows (`list[int]`): The rows that need a proposal, in the order of the answer.
            lookahead (`int`): The largest number of tokens to propose.

        Returns:
            [`~hf_ssd.rounds.Speculation`]: The tokens of each of these rows, and the distributions `(rows, width,
            vocab_size)` that they were drawn from, `None` for point masses. Where a row has fewer than `width` tokens,
            token 0 is certain.
        """


class Texts:
    """The verified tokens of each row as a tensor, for proposers."""

    def __init__(self, texts: list[list[int]]):
        self.lengths = [0] * len(texts)
        self.ids = torch.zeros(len(texts), 64, dtype=torch.long)  # (batch_size, capacity), without padding in front
        self.read(texts)

    def read(self, texts: list[list[int]]) -> None:
        """Adds what the texts have gained."""
        new, longest = [text[length:] for text, length in zip(texts, self.lengths)], max(map(len, texts))
        if longest > self.ids.shape[1]:
            self.ids = torch.cat([self.ids, self.ids.new_zeros(len(self.ids), longest)], dim=1)
        for row, tokens in enumerate(new):
            end = self.lengths[row] + len(tokens)
            self.ids[row, self.lengths[row] : end] = torch.tensor(tokens, dtype=torch.long)
            self.lengths[row] = end


def point_masses(tokens: torch.LongTensor, vocab_size: int) -> torch.FloatTensor:
    """Returns distributions `(..., vocab_size)` in which each of the tokens `(...)` is certain."""
    empty = torch.zeros(*tokens.shape, vocab_size, dtype=torch.float32, device=tokens.device)
    return empty.scatter_(-1, tokens[..., None], 1.0)


def joined(
    tokens: list[list[int]],
    vocab_size: int,
    device: torch.device,
    drafted: list[int],
    q: torch.FloatTensor | None,
    missed: list[int],
    proposal: Speculation | None,
) -> torch.FloatTensor:
    """
    Returns the distributions `(batch_size, width, vocab_size)` that the tokens of all rows were drawn from. The first
    `drafted` tokens of a row are the draft's, drawn from `q`; the `missed` rows have those of a proposal. Tokens of
    neither the draft nor a proposal with distributions are certain, padding included.
    """
    result = point_masses(from_host(tokens, device), vocab_size)
    if q is not None:
        width = min(q.shape[1], result.shape[1])
        is_drafted = torch.arange(width, device=device) < from_host(drafted, device)[:, None]
        result[:, :width] = torch.where(is_drafted[..., None], from_host(q[:, :width], device), result[:, :width])
    if proposal is not None and proposal.probabilities is not None:
        theirs = from_host(proposal.probabilities[:, : result.shape[1]], device)
        result[from_host(missed, device), : theirs.shape[1]] = theirs
    return result
