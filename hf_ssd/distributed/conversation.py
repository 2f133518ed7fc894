"""The messages of one generate() call between the target and one draft worker."""

import contextlib
import time
from collections.abc import Sequence

import torch

from . import messages, payloads
from .channel import PeerLost
from .connection import Connection
from .messages import Kind, Message, ProtocolError
from .session import DraftError, SessionRequest


class Conversation:
    """
    Sends and receives with a deadline, drops what is late, and knows whether the worker can be used again.

    Args:
        worker ([`Connection`]): The worker, at rest.
        number (`int`): Number of the session. Answers to other numbers are late ones, and dropped.
        request ([`SessionRequest`]): The call.
    """

    def __init__(self, worker: Connection, number: int, request: SessionRequest):
        self.worker, self.number, self.timeout = worker, number, request.config.timeout
        self.batch_size, self.round = len(request.prompts), -1
        self.is_sound = True
        worker.channel.make_room(self.batch_size, worker.worker_info["vocab_size"])
        send = worker.channel.send
        send(Message(Kind.START, number, payload=payloads.json_to_payload(request.to_dict())))
        send(Message(Kind.PROMPTS, number, payload=payloads.prompts_to_payload(request.prompts)))

    def send(self, kind: Kind, payload: torch.Tensor) -> None:
        """Sends a message of the current round, and gets ready for the answer."""
        self.is_sound = False  # until all is sent: an interrupt must not leave half a message
        self.worker.channel.send(Message(kind, self.number, self.round, payload))
        self.worker.channel.expect()
        self.is_sound = True

    def send_outcomes(self, payloads: list[torch.Tensor], kind: Kind = Kind.OUTCOME) -> None:
        """
        Begins a round with its outcome, and before it those of rounds in which the worker was not asked; or, as
        `Kind.NEWS`, tells of these alone.
        """
        self.round += len(payloads)
        self.send(kind, torch.cat(payloads))

    def has_arrived(self) -> bool:
        """Whether a message, which must be expected, has begun to arrive, or the worker has ended."""
        return self.worker.channel.has_arrived()

    def receive(self, *kinds: Kind, timeout: float | None = None) -> Message:
        """
        Returns the next message, which must be of one of these kinds and of the current round. Older ones are dropped.

        Args:
            kinds (`Kind`): One or more.
            timeout (`float`, *optional*): Seconds, instead of those of the config.

        Raises:
            [`DraftError`]: nothing came in time, the worker raised or has ended, or what came makes no sense.
        """
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        self.is_sound = False  # until it has answered
        try:
            while True:
                with self.expecting_sense():
                    message = self.worker.channel.receive(max(0.0, deadline - time.monotonic()))
                if message.kind == Kind.ERROR and not message.session:
                    break  # it could not read what was sent, and does not know which call that belongs to
                if message.session == self.number and (message.round >= self.round or message.kind == Kind.ERROR):
                    break
            if message.kind == Kind.ERROR:
                traceback = payloads.payload_to_text(message.payload)
                self.is_sound = "CUDA error" not in traceback  # after one, nothing on that device works again
                raise DraftError(f"The draft worker raised:\n{traceback}")
            with self.expecting_sense():
                messages.expect(message, message.kind if message.kind in kinds else kinds[0], self.number, self.round)
        except TimeoutError:
            raise DraftError(f"The draft worker did not answer within {self.timeout:g} s.") from None
        except PeerLost as error:
            raise DraftError(f"The draft worker has ended. {self.worker.stderr_tail()}".strip()) from error
        self.is_sound = True
        return message

    def expect(self) -> None:
        """Lets the next message arrive while this process computes."""
        self.is_sound = False
        self.worker.channel.expect()
        self.is_sound = True

    @contextlib.contextmanager
    def expecting_sense(self):
        """A [`ProtocolError`] in this block is the worker's, and becomes a [`DraftError`]."""
        try:
            yield
        except ProtocolError as error:
            self.is_sound = False
            raise DraftError(f"The draft worker sent something unexpected: {error}") from error

    def close(self, outcomes: Sequence[torch.Tensor] = ()) -> None:
        """
        Leaves the worker at rest, and lets it learn from the payloads of `outcomes` that it was not told of; or ends it
        if it cannot be used again.
        """
        if self.is_sound and self.worker.is_alive:
            payload = torch.cat([torch.empty(0, dtype=torch.int64), *outcomes])
            self.worker.channel.send(Message(Kind.END, self.number, payload=payload))
            if self.worker.channel.link is None or self._has_taken_all():
                return
        self.worker.kill()  # the next call starts another one

    def _has_taken_all(self) -> bool:
        """Takes what is still on its way, because over a link a kernel of the draft's GPU would wait with it."""
        deadline = time.monotonic() + self.timeout
        try:
            while True:
                message = self.worker.channel.receive(max(0.0, deadline - time.monotonic()))
                if (message.kind, message.session) == (Kind.END, self.number):
                    return True
        except (TimeoutError, PeerLost, ProtocolError):
            return False
