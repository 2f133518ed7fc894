"""The draft in the target's own process: ordinary, synchronous speculative decoding."""

import time

import torch
from transformers import PreTrainedModel

from ..speculation.speculator import Speculator
from .session import DraftSession, SessionRequest


class LocalSession(DraftSession):
    """
    Drafts when asked, in turn with the target. Nothing is prepared, so no row ever hits.

    Args:
        model (`PreTrainedModel`): The draft model.
        request (`SessionRequest`): The call.
    """

    def __init__(self, model: PreTrainedModel, request: SessionRequest):
        self.speculator = Speculator(model, request.config, request.generation_config, request.prompts, request.seed)
        self.speculator.prefill()

    def send_outcome(self, accepted: torch.LongTensor, bonus: torch.LongTensor) -> None:
        self.outcome = (accepted, bonus)

    def receive_speculation(self) -> tuple[torch.LongTensor, torch.BoolTensor, float]:
        start = time.perf_counter()
        self.speculation = self.speculator.answer(*self.outcome)
        return self.speculation.tokens, self.speculation.hits, time.perf_counter() - start

    def receive_probabilities(self) -> torch.FloatTensor:
        return self.speculation.probabilities

    def close(self) -> None:
        self.speculator = None
