"""The target's end of a conversation with a draft worker."""

import time
from collections.abc import Callable

import torch

from . import messages
from .channel import PeerLost
from .messages import Kind, Message, ProtocolError
from .process import WorkerProcess
from .session import DraftError, DraftSession, SessionRequest


class WorkerSession(DraftSession):
    """
    One generate() call's conversation with a worker.

    Args:
        worker ([`WorkerProcess`]): The worker, at rest.
        number (`int`): Number of the session. Answers to other numbers are late ones, and dropped.
        request ([`SessionRequest`]): The call.
        on_close (`Callable`): Called once, when the conversation is over.
    """

    def __init__(self, worker: WorkerProcess, number: int, request: SessionRequest, on_close: Callable[[], None]):
        self.worker, self.number, self.on_close = worker, number, on_close
        self.batch_size, self.timeout = len(request.prompts), request.config.timeout
        self.round = -1
        self.worker_is_sound = True
        send = worker.channel.send
        send(Message(Kind.START, number, payload=messages.json_to_payload(request.to_dict())))
        send(Message(Kind.PROMPTS, number, payload=messages.prompts_to_payload(request.prompts)))

    def send_outcome(self, accepted: torch.LongTensor, bonus: torch.LongTensor) -> None:
        self.round += 1
        self.worker_is_sound = False  # until all is sent: an interrupt must not leave half a message
        payload = messages.outcome_to_payload(accepted, bonus)
        self.worker.channel.send(Message(Kind.OUTCOME, self.number, self.round, payload))
        self.worker.channel.expect()
        self.worker_is_sound = True

    def receive_speculation(self) -> tuple[torch.LongTensor, torch.BoolTensor, float]:
        message = self._receive(Kind.SPECULATION)
        tokens, hits, seconds = messages.payload_to_speculation(message.payload, self.batch_size)
        self.shape = (*tokens.shape, self.worker.facts["vocab_size"])
        self.worker.channel.expect()  # probabilities may arrive while the target computes
        return tokens, hits, seconds

    def receive_probabilities(self) -> torch.FloatTensor:
        return messages.payload_to_probabilities(self._receive(Kind.PROBABILITIES).payload, self.shape)

    def _receive(self, kind: Kind) -> Message:
        deadline = time.monotonic() + self.timeout
        self.worker_is_sound = False  # until it has answered
        try:
            while True:
                message = self.worker.channel.receive(max(0.0, deadline - time.monotonic()))
                if message.session == self.number:
                    break
            if message.kind == Kind.ERROR:
                self.worker_is_sound = True
                raise DraftError(f"The draft worker raised:\n{messages.payload_to_text(message.payload)}")
            messages.expect(message, kind, self.number, self.round)
        except TimeoutError:
            raise DraftError(f"The draft worker did not answer within {self.timeout:g} s.") from None
        except PeerLost as error:
            raise DraftError(f"The draft worker has ended. {self.worker.last_words()}".strip()) from error
        except ProtocolError as error:
            raise DraftError(f"The draft worker sent something unexpected: {error}") from error
        self.worker_is_sound = True
        return message

    def close(self) -> None:
        try:
            if self.worker_is_sound and self.worker.is_alive:
                self.worker.channel.send(Message(Kind.END, self.number))
            else:
                self.worker.kill()  # the next call starts another one
        finally:
            self.on_close()
