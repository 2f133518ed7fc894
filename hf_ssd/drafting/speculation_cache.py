"""The speculation cache: from a verification outcome to the speculation that was prepared for it."""

from collections.abc import Iterator

import torch

from ..devices import from_host
from ..rounds import RoundRecord
from .outcome_candidates import OutcomeCandidates


class SpeculationCache:
    """The speculations prepared in a round: a branch for each of N outcomes of each row, on the host, of any length."""

    def __init__(
        self, accepted: list[list[int]], bonus: list[list[int]], candidates: OutcomeCandidates, record: RoundRecord
    ):
        self.accepted, self.bonus, self.candidates, self.record = accepted, bonus, candidates, record
        # For each row, the branch that was prepared for each outcome (accepted count, bonus token).
        self.branches = [
            {outcome: branch for branch, outcome in enumerate(zip(*of_row))} for of_row in zip(accepted, bonus)
        ]
        self.tokens: list[list[list[int]]] = [[[] for _ in of_row] for of_row in bonus]
        self.probabilities: list[torch.FloatTensor] = []
        self.supports: list[list[list[int]]] = []
        self.beside: list[list[list[list[int]]]] = [[[] for _ in of_row] for of_row in bonus]

    def append(
        self, tokens: list, probabilities: torch.FloatTensor | None, supports: list | None, beside: list | None = None
    ) -> None:
        """Adds T tokens `(batch_size, N, T)` of every branch, with distributions, supports and what is beside them."""
        for known, added in ((self.tokens, tokens), (self.beside, beside or ())):
            for of_row, new_of_row in zip(known, added):
                for branch, new in zip(of_row, new_of_row):
                    branch += new
        if probabilities is not None:
            self.probabilities.append(probabilities)
        if supports is not None:
            self.supports.append(supports)

    def lookup(self, accepted: list[int], bonus: list[int]) -> list[int]:
        """Returns the branch that was prepared for the outcome of each row, -1 for a miss."""
        return [branches.get(outcome, -1) for branches, outcome in zip(self.branches, zip(accepted, bonus))]

    def of(self, branches: list[int]) -> Iterator[list]:
        """Returns the tokens of each row's branch, none for a miss, and what stands beside them."""
        for store in (self.tokens, self.beside):
            yield [[] if branch < 0 else of_row[branch] for of_row, branch in zip(store, branches)]

    def go_on(self, row: int, branch: int, token: int) -> bool:
        """Whether the tokens of a branch begin with this token, which is then taken from them."""
        if self.tokens[row][branch][:1] != [token]:
            return False
        del self.tokens[row][branch][0], self.beside[row][branch][:1]
        return True

    def support(self, branches: list[int]) -> int:
        """Returns the largest number of possible tokens in a distribution of these branches, 0 without a hit."""
        hits = [(row, branch) for row, branch in enumerate(branches) if branch >= 0]
        return max((n for part in self.supports for row, branch in hits for n in part[row][branch]), default=0)

    def distributions(self, branches: list[int], width: int) -> torch.FloatTensor | None:
        """Returns what the branches' tokens were drawn from `(batch_size, width or less, vocab_size)`, if at random."""
        # Rows that missed hold arbitrary values.
        if not self.probabilities:
            return None
        device = self.probabilities[0].device
        rows, index = from_host([list(range(len(branches))), [max(0, branch) for branch in branches]], device)
        return torch.cat([part[rows, index] for part in self.probabilities], dim=1)[:, :width]
