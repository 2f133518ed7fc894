"""A fallback that drafts with the target's own MTP layer, in the target's process, where the hidden states are."""

import dataclasses

import torch

from ...devices import from_host
from ...drafting.drafts import Drafts
from ...rounds import Outcome, Plan, Speculation
from .base import Proposer


class MtpFallback(Proposer):
    """
    The head follows the text of all rows from round to round, whoever proposes, because it reads the target's hidden
    states at every token. It drafts only in rounds in which a row misses. The noise of its tokens is not that of the
    draft, whose tokens the outcome depends on.

    Args:
        head ([`~hf_ssd.drafting.heads.mtp.MtpHead`]): The target's MTP layer.
        request ([`SessionRequest`]): The call.
    """

    def __init__(self, head, request):
        config = dataclasses.replace(request.config, fallback="primary", drafter="auto")
        own = dataclasses.replace(request, config=config, seed=request.seed ^ 1, translation=None)
        self.speculator = Drafts().speculator(head, own)
        self.speculator.begin()

    def take_in(self, outcome: Outcome, plan: Plan, features: torch.Tensor) -> None:
        self.found = self.speculator.look_up(outcome, plan, lambda *_: features)

    def propose(self, ids, lengths, rows: list[int], lookahead: int) -> Speculation:
        done = self.speculator.complete(self.found, lookahead)
        q, tokens = self.speculator.distributions(done), [done.tokens[row] for row in rows]
        return Speculation(tokens, None if q is None else q[from_host(rows, q.device)])

    def take_speculation(self, tokens: list[list[int]], sources: list[str]) -> None:
        self.speculator.take_speculation(tokens, sources)
