"""A generate() call without a draft model: each row proposes from its own text, in the target's process."""

import time

from ..drafting.ngrams import Ngrams, speculation_of
from ..rounds import FINISHED, Outcome, Plan, Speculation, since
from .sessions import DraftSession, SessionRequest


class LookupSession(DraftSession):
    """
    Looks up each row's last tokens in the row. Every proposed token counts as certain. In a round in which no row has a
    match, the target decodes plainly.

    Args:
        request ([`SessionRequest`]): The call.
    """

    def __init__(self, request: SessionRequest):
        self.ngrams = Ngrams([prompt.tolist() for prompt in request.prompts])
        self.verified: list[list[int]] = [[] for _ in request.prompts]

    def send_outcome(self, outcome: Outcome, plan: Plan, features=None) -> None:
        self.outcome, self.plan = outcome, plan

    def receive_speculation(self) -> Speculation:
        start, finished = time.perf_counter(), [k == FINISHED for k in self.outcome.accepted]
        self.ngrams.take_in(self.outcome.new_tokens(self.verified))
        speculation = speculation_of(self.ngrams.propose(finished, self.plan.lookahead, alone=True), self.plan.mode)
        self.verified, record = speculation.tokens, speculation.record
        record.answered_at, record.answer_seconds = start, since(start)
        return speculation

    def receive_probabilities(self) -> None:
        return None  # the loop does not ask for the probabilities of certain tokens

    def close(self) -> None:
        self.ngrams = None
