"""A generate() call with a single draft worker, as the target sees it."""

import time
from collections.abc import Callable

import torch

from ..rounds import Outcome, Plan, Speculation
from . import wire
from .channel import PeerLost
from .connection import Connection
from .session import DraftError, DraftSession, SessionRequest
from .wire import Kind, Message, ProtocolError


class WorkerSession(DraftSession):
    """
    Sends and receives with a deadline, drops late messages, and knows whether the worker can be used again.

    Args:
        worker ([`Connection`]): The worker, at rest.
        number (`int`): Number of the session. Answers with another number are late and are dropped.
        request ([`SessionRequest`]): The call.
        on_close (`Callable`, *optional*): Called once, when the worker is at rest again or has ended.

    Attributes:
        rows (`int`): Batch size.
        vocab_size (`int`): Number of the target's tokens.
    """

    def __init__(
        self, worker: Connection, number: int, request: SessionRequest, on_close: Callable[[], None] = lambda: None
    ):
        self.worker, self.number, self.timeout, self.on_close = worker, number, request.config.timeout, on_close
        self.rows, self.vocab_size, self.round = len(request.prompts), request.vocab_size, -1
        self.is_reusable, self.answers_alone = True, request.answers_alone
        worker.channel.make_room(self.rows, self.vocab_size)
        send = worker.channel.send
        if request.translation is not None and worker.translation is not request.translation:
            send(Message(Kind.VOCABULARY, payload=request.translation.to_tensor()))
            worker.translation = request.translation
        send(Message(Kind.START, number, payload=wire.write_json(request.to_dict())))
        send(Message(Kind.PROMPTS, number, payload=wire.write_prompts(request.prompts)))

    def send_outcome(self, outcome: Outcome, plan: Plan, features: torch.Tensor | None = None) -> None:
        self.round += 1
        self._send(Kind.OUTCOME, wire.write_outcome(outcome, plan), features)

    def send_speculation(self, speculation: Speculation) -> None:
        """Tells a worker that does not answer alone which tokens are verified, or lets it draft the missing tokens."""
        self._send(Kind.SPECULATION, wire.write_speculation(speculation))

    def _send(self, kind: Kind, payload: torch.Tensor, features: torch.Tensor | None = None) -> None:
        self.is_reusable = False  # until the message is sent: an interrupt may leave half of it
        announced = None
        if features is not None and len(features):  # the outcome leaves first, and the features are copied after it
            features = features.float() if features.dtype == torch.float64 else features
            announced = Message(Kind.FEATURES, self.number, self.round, features.flatten())
        self.worker.channel.send(Message(kind, self.number, self.round, payload, announces=announced))
        if announced is not None:
            self.worker.channel.send_announced(announced.payload)
        self.worker.channel.expect()
        self.is_reusable = True

    def has_arrived(self) -> bool:
        """Whether a message, which must be expected, has begun to arrive, or the worker has ended."""
        return self.worker.channel.has_arrived()

    def receive_speculation(self, timeout: float | None = None) -> Speculation:
        speculation = self._receive(Kind.SPECULATION, self._read_speculation, timeout)
        self.shape = (self.rows, speculation.width, self.vocab_size)
        self.is_reusable = False
        self.worker.channel.expect()  # probabilities may arrive while the target computes
        self.is_reusable = True
        return speculation

    def _read_speculation(self, payload) -> Speculation:
        speculation = wire.read_speculation(payload, self.rows, self.vocab_size)
        if self.answers_alone and len(set(map(len, speculation.tokens))) > 1:
            raise ProtocolError("the rows of a speculation that is to be verified have different lengths")
        return speculation

    def receive_probabilities(self) -> torch.FloatTensor:
        return self._receive(Kind.PROBABILITIES, lambda payload: wire.read_probabilities(payload, self.shape))

    def _receive(self, kind: Kind, read: Callable, timeout: float | None = None):
        """
        Returns the result of `read` for the payload of the next message, which must be of this kind and of the current
        round. Older messages are dropped.

        Raises:
            [`DraftError`]: no message came in time, the worker raised or has ended, or the message is invalid.
        """
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        self.is_reusable = False  # until the worker has answered
        try:
            while True:
                message = self.worker.channel.receive(max(0.0, deadline - time.monotonic()))
                if message.kind == Kind.ERROR and not message.session:
                    break  # the worker could not read a message, so it does not know the call
                if message.session == self.number and (message.round >= self.round or message.kind == Kind.ERROR):
                    break
            if message.kind == Kind.ERROR:
                traceback = wire.read_text(message.payload)
                self.is_reusable = "CUDA error" not in traceback  # after a CUDA error, the device fails in that process
                raise DraftError(f"The draft worker raised:\n{traceback}")
            wire.expect(message, kind, self.number, self.round)
            result = read(message.payload)
        except ProtocolError as error:
            raise DraftError(f"The draft worker sent something unexpected: {error}") from error
        except TimeoutError:
            raise DraftError(f"The draft worker did not answer within {self.timeout:g} s.") from None
        except PeerLost as error:
            raise DraftError(f"The draft worker has ended. {self.worker.stderr_tail()}".strip()) from error
        self.is_reusable = True
        return result

    def close(self) -> None:
        """Leaves the worker at rest, or kills it if it cannot be used again; the next call then starts another."""
        if self.is_reusable and self.worker.is_alive:
            self.worker.channel.send(Message(Kind.END, self.number))
            if self.worker.channel.link is not None and not self._has_taken_all():
                self.worker.kill()
        else:
            self.worker.kill()
        self.on_close()

    def _has_taken_all(self) -> bool:
        """
        Receives messages until the worker's `END`, because a kernel on the draft's GPU waits until each payload that
        was sent over the link is received. Returns whether `END` came in time.
        """
        deadline = time.monotonic() + self.timeout
        try:
            while True:
                message = self.worker.channel.receive(max(0.0, deadline - time.monotonic()))
                if (message.kind, message.session) == (Kind.END, self.number):
                    return True
        except (TimeoutError, PeerLost, ProtocolError):
            return False
