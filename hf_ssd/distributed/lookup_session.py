"""A generate() call without a draft model: each row proposes from its own text, in the target's process."""

import time

from ..drafting.fallbacks import padded
from ..drafting.prompt_lookup import PromptLookup
from ..rounds import FINISHED, NGRAM, NOTHING, Outcome, Plan, RoundRecord, Speculation, since
from .sessions import DraftSession, SessionRequest


class LookupSession(DraftSession):
    """
    Looks up each row's last tokens in the row. Every proposed token counts as certain. In a round in which no row has a
    match, the target decodes plainly.

    Args:
        request ([`SessionRequest`]): The call.
    """

    def __init__(self, request: SessionRequest):
        self.rows = [PromptLookup(prompt.tolist()) for prompt in request.prompts]
        self.proposed: list[list[int]] = [[] for _ in self.rows]

    def send_outcome(self, outcome: Outcome, plan: Plan, features=None) -> None:
        self.outcome, self.plan = outcome, plan

    def receive_speculation(self) -> Speculation:
        start, outcome, texts = time.perf_counter(), self.outcome, []
        later = outcome.later or [[] for _ in self.rows]
        for row, k, bonus, proposed, more in zip(self.rows, outcome.accepted, outcome.bonus, self.proposed, later):
            if k == FINISHED:
                texts.append([])
            else:
                row.extend([*proposed[:k], bonus, *more])
                texts.append(row.propose(self.plan.lookahead))
        width = max(map(len, texts))
        self.proposed = padded(texts, width)
        record = RoundRecord(self.plan.mode, width, sources=[NGRAM if text else NOTHING for text in texts])
        record.lengths = list(map(len, texts))
        record.answered_at, record.answer_seconds = start, since(start)
        return Speculation(self.proposed, None, record, are_certain=True)

    def receive_probabilities(self) -> None:
        return None  # the loop does not ask for the probabilities of certain tokens

    def close(self) -> None:
        self.rows = []
