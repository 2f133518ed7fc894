"""The target's end of a conversation with a draft worker."""

import time
from collections.abc import Callable

import torch

from . import payloads
from .connection import Connection
from .conversation import Conversation
from .messages import ROUNDS_BETWEEN_NEWS, Kind
from .session import Answer, DraftSession, SessionRequest
from .user_fallback import UserFallback


class WorkerSession(DraftSession):
    """
    One generate() call with one worker.

    Args:
        worker ([`Connection`]): The worker, at rest.
        number (`int`): Number of the session.
        request ([`SessionRequest`]): The call.
        on_close (`Callable`): Called once, when the worker is at rest again or has ended.
    """

    def __init__(self, worker: Connection, number: int, request: SessionRequest, on_close: Callable[[], None]):
        self.on_close, self.vocab_size = on_close, worker.worker_info["vocab_size"]
        self.user_fallback = UserFallback.of(request, self.vocab_size)
        self.conversation = Conversation(worker, number, request)
        self.rest, self.missed = 0, []  # rounds in which the draft is not asked, and their outcomes so far
        self.was_asked, self.left_at = True, 0.0

    def send_outcome(self, accepted: torch.LongTensor, bonus: torch.LongTensor, seconds: float, verified: int) -> None:
        before, self.left_at = self.left_at, time.perf_counter()
        if not self.was_asked:  # bookkeeping had nothing to hide behind
            seconds = self.left_at - before
        self.missed.append(payloads.outcome_to_payload(accepted, bonus, seconds, verified))
        if not self.rest or len(self.missed) == ROUNDS_BETWEEN_NEWS:
            self.conversation.send_outcomes(self.missed, Kind.NEWS if self.rest else Kind.OUTCOME)
            self.missed = []
        if self.user_fallback is not None:
            self.user_fallback.observe_outcome(accepted, bonus)

    def receive_speculation(self) -> Answer:
        self.was_asked = not self.rest
        if self.rest:
            self.rest -= 1
            rows = self.conversation.batch_size
            return Answer(torch.zeros(rows, 0, dtype=torch.long), torch.zeros(rows, dtype=torch.bool))
        message = self.conversation.receive(Kind.SPECULATION, Kind.BACKUP_REQUEST)
        if message.kind == Kind.BACKUP_REQUEST:
            self.user_fallback.answer(message, self.conversation)
            message = self.conversation.receive(Kind.SPECULATION)
        with self.conversation.expecting_sense():
            answer = payloads.payload_to_answer(message.payload, self.conversation.batch_size)
            payloads.check_tokens(answer.tokens.flatten(), self.vocab_size)
        self.shape, self.rest = (*answer.tokens.shape, self.vocab_size), answer.rest
        self.conversation.expect()  # probabilities may arrive while the target computes
        if self.user_fallback is not None:
            self.user_fallback.observe_speculation(answer.tokens)
        return answer

    def receive_probabilities(self) -> torch.FloatTensor:
        message = self.conversation.receive(Kind.PROBABILITIES)
        with self.conversation.expecting_sense():
            return payloads.payload_to_probabilities(message.payload, self.shape)

    def close(self) -> None:
        self.conversation.close(self.missed)
        self.on_close()
