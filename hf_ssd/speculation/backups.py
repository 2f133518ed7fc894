"""Which cheap proposer stands in for the draft after a miss, and how its proposals join what was prepared."""

import torch

from ..cache.speculation import Speculation
from ..devices import from_host
from .fallback import Backup, NGramBackup, Proposal, RandomBackup, dense_probabilities


class Backups:
    """
    The proposers of one call.

    Args:
        vocab_size (`int`): Number of tokens.
        seed (`int`): Of the random one.
        custom ([`~hf_ssd.speculation.fallback.Backup`], *optional*): The user's own, which takes the place of all.
    """

    def __init__(self, vocab_size: int, seed: int, custom: Backup | None = None):
        self.custom, self.ngram = custom, NGramBackup()
        self.by_name = {"ngram": self.ngram, "random": RandomBackup(vocab_size, seed)}

    def of(self, fallback: str) -> tuple[str, Backup | None]:
        """
        Returns where speculations come from with this fallback, by name (see [`~hf_ssd.speculation.planner.Round`])
        and, if it is not the draft, as an object.
        """
        if self.custom is not None:
            return "custom", self.custom
        return fallback, self.by_name.get(fallback)


def join(
    ready: Speculation, missed: list[int], proposal: Proposal, vocab_size: int, with_probabilities: bool
) -> Speculation:
    """
    Gives the rows that missed what a backup proposes for them; the others keep what is ready.

    Args:
        ready ([`~hf_ssd.cache.speculation.Speculation`]): What was prepared. If it is wider than the
            proposal, as it may be when another draft prepared it with an earlier plan, it is cut.
        missed (`list[int]`): The rows that the proposal is for.
        proposal ([`~hf_ssd.speculation.fallback.Proposal`]): At least one row.
        vocab_size (`int`): Number of tokens.
        with_probabilities (`bool`): Whether tokens are sampled, so that it matters what they were drawn from.

    Returns:
        [`~hf_ssd.cache.speculation.Speculation`], as wide as the proposal or, if no row hit, as its longest row.
    """
    some_hit, device = bool(ready.hits.any()), ready.tokens.device
    width = proposal.tokens.shape[1] if some_hit else max(proposal.counts)
    grown = min(ready.tokens.shape[1], width)
    tokens = ready.tokens.new_zeros(len(ready.tokens), width)
    if some_hit:
        tokens[:, :grown] = ready.tokens[:, :grown]
    rows = from_host(missed, device)
    tokens[rows] = from_host(proposal.tokens[:, :width], device)
    probabilities = None
    if with_probabilities:
        probabilities = torch.zeros(*tokens.shape, vocab_size, dtype=torch.float32, device=device)
        probabilities[..., 0] = 1.0  # of rows that are finished
        if some_hit and grown:
            probabilities[:, :grown] = ready.probabilities[:, :grown]
        probabilities[rows] = from_host(dense_probabilities(proposal, vocab_size)[:, :width], device)
    return Speculation(tokens, probabilities, ready.hits)
