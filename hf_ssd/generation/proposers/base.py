"""The interface of proposers in the target's process."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from transformers import GenerationConfig

from ...rounds import Outcome, Plan


class Proposal(NamedTuple):
    """Tokens to verify next for a row, and the distribution `(tokens, vocab_size)` that each was drawn from."""

    tokens: list[int]
    probabilities: torch.FloatTensor | None = None  # each token is certain


class Proposer(ABC):
    """Proposes the next tokens of rows whose outcome had not been prepared. A new proposer is a line in `PROPOSERS`."""

    def take_in(self, outcome: Outcome, plan: Plan) -> None:
        """Is told of each outcome that the draft is told of, with the target's states if the call reads them."""

    def join(self, row: int, start: int, tokens: list[int], options: GenerationConfig | None, seed: int) -> None:
        """Is told of the next tokens of a row that joins, as the draft is, before the outcome."""

    @abstractmethod
    def propose(self, texts: list[list[int]], rows: list[int], lookahead: int) -> list[Proposal]:
        """
        Proposes up to `lookahead` tokens for each of these rows. `texts` has the verified tokens of every row, prompt
        and output, without padding. Each is a list that grows, another list for another text, and is not written to.
        """
