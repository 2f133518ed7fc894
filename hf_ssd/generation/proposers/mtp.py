"""A fallback that drafts with the target's own MTP layer, in the target's process, where the hidden states are."""

import dataclasses

from ...config import REJECTION
from ...drafting.drafts import Drafts
from ...rounds import PLAIN, Outcome, Plan
from .base import Proposal, Proposer


class MtpFallback(Proposer):
    """
    The head follows the text of all rows, and drafts in rounds in which one misses. The noise of its tokens is not that
    of the draft, whose tokens the outcome depends on, unless the call is coupled.
    """

    def __init__(self, head, request):
        config = dataclasses.replace(request.config, fallback="primary", drafter="auto")
        seed = request.seed ^ (config.verification == REJECTION)
        own = dataclasses.replace(request, config=config, seed=seed, translation=None)
        self.speculator = Drafts().speculator(head, own)
        self.speculator.drafter.begin()
        self.join = self.speculator.join

    def take_in(self, outcome: Outcome, plan: Plan) -> None:
        self.speculator.prepare(Plan(PLAIN))  # takes in the last outcome, and the rows that joined with it
        self.found = self.speculator.look_up(outcome, plan)

    def propose(self, texts: list[list[int]], rows: list[int], lookahead: int) -> list[Proposal]:
        done = self.speculator.complete(self.found, lookahead)
        q = self.speculator.distributions(done)
        return [Proposal(done.tokens[row], None if q is None else q[row]) for row in rows]
