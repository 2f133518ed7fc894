"""The draft in the target's own process: a session that calls the speculator, and sends nothing."""

import contextlib
import weakref

import torch
from transformers import PreTrainedModel

from ..drafting.drafts import Drafts
from ..rounds import Outcome, Plan, Speculation, padded
from .sessions import DraftError, DraftSession, SessionRequest

_drafts: "weakref.WeakKeyDictionary[PreTrainedModel, Drafts]" = weakref.WeakKeyDictionary()


class LocalSession(DraftSession):
    """
    The draft works while the target waits for its answer. What it has prepared ahead, if a plan has a budget, it
    prepares then too. The draft's exceptions are raised as [`DraftError`].
    """

    def __init__(self, model: PreTrainedModel, request: SessionRequest):
        with _as_draft_error():
            self.speculator = _drafts.setdefault(model, Drafts()).speculator(model, request)
            self.speculator.plan = request.plan
            self.speculator.begin()

    def send_outcome(self, outcome: Outcome, plan: Plan) -> None:
        self.told = outcome, plan

    def receive_speculation(self) -> Speculation:
        with _as_draft_error():
            self.speculator.prepare(self.speculator.plan)
            self.answer = self.speculator.complete(self.speculator.look_up(*self.told))
            return self.answer

    def send_proposals(self, tokens: list[list[int]], sources: list[str]) -> None:
        self.speculator.take_speculation(padded(tokens, max(map(len, tokens))), sources)

    def receive_probabilities(self) -> torch.FloatTensor | None:
        with _as_draft_error():
            return self.speculator.distributions(self.answer)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the call has all its tokens
            self.speculator.end()


@contextlib.contextmanager
def _as_draft_error():
    try:
        yield
    except Exception as error:
        raise DraftError(f"The draft raised {type(error).__name__}: {error}") from error
