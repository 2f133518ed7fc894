"""The draft in the target's own process: ordinary, synchronous speculative decoding."""

import time
import weakref

import torch
from transformers import PreTrainedModel

from ..speculation.experience import Experience
from ..speculation.fallback import CustomBackup
from ..speculation.speculator import Speculator
from .session import Answer, DraftSession, SessionRequest


class LocalSession(DraftSession):
    """
    Drafts when asked, in turn with the target. Nothing is prepared, so no row ever hits.

    Args:
        model (`PreTrainedModel`): The draft model.
        request (`SessionRequest`): The call.
    """

    def __init__(self, model: PreTrainedModel, request: SessionRequest):
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        self.speculator = Speculator(
            model,
            request.config,
            request.generation_config,
            request.prompts,
            request.seed,
            _experiences.setdefault(model, Experience()),
            CustomBackup(request.config.fallback, vocab_size) if request.asks_target else None,
        )
        self.speculator.prefill()

    def send_outcome(self, accepted: torch.LongTensor, bonus: torch.LongTensor, seconds: float, verified: int) -> None:
        self.outcome = (accepted, bonus, seconds, verified)

    def receive_speculation(self) -> Answer:
        start = time.perf_counter()
        self.speculation = self.speculator.answer(*self.outcome)
        self.speculator.prepare()  # nothing but the plan for the next round
        elapsed = time.perf_counter() - start
        return Answer(self.speculation.tokens, self.speculation.hits, elapsed, elapsed, answered_at=start)

    def receive_probabilities(self) -> torch.FloatTensor:
        return self.speculation.probabilities

    def close(self) -> None:
        self.speculator.end()
        self.speculator = None


_experiences: "weakref.WeakKeyDictionary[PreTrainedModel, Experience]" = weakref.WeakKeyDictionary()
