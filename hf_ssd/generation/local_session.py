"""A draft in the target's process: a session without messages."""

import contextlib
import weakref

import torch
from transformers import PreTrainedModel

from ..distributed.requests import raised_as
from ..distributed.sessions import DraftError, DraftSession
from ..drafting.drafts import Drafts
from ..drafting.request import SessionRequest
from ..rounds import Outcome, Plan, Speculation

RAISED = "The draft raised"
_drafts: "weakref.WeakKeyDictionary[PreTrainedModel, Drafts]" = weakref.WeakKeyDictionary()


class LocalSession(DraftSession):
    """The draft works, and prepares if a plan has a budget, while the target waits for its answer."""

    def __init__(self, model: PreTrainedModel, request: SessionRequest):
        with raised_as(DraftError, RAISED):
            self.speculator = _drafts.setdefault(model, Drafts()).speculator(model, request)
            self.speculator.plan, self.join = request.plan, self.speculator.join
            self.speculator.drafter.begin()

    def send_outcome(self, outcome: Outcome, plan: Plan) -> None:
        self.told = outcome, plan

    def receive_speculation(self) -> Speculation:
        with raised_as(DraftError, RAISED):
            self.speculator.prepare(self.speculator.plan)
            self.answer = self.speculator.complete(self.speculator.look_up(*self.told))
            return self.answer

    def send_proposals(self, tokens: list[list[int]], sources: list[str]) -> None:
        self.speculator.take_speculation(tokens, sources)

    def receive_probabilities(self) -> torch.FloatTensor | None:
        with raised_as(DraftError, RAISED):
            return self.speculator.distributions(self.answer)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the call has all its tokens
            self.speculator.end()
