"""A draft worker in the target's process, whose messages are packed as on their way to another process."""

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable

import torch

from hf_ssd.distributed.assistant import DraftAssistant
from hf_ssd.distributed.draft_server import DraftServer
from hf_ssd.distributed.sessions import DraftError
from hf_ssd.distributed.shared_channel import SharedChannel
from hf_ssd.distributed.wire import Message, pack, read_json, unpack
from hf_ssd.drafting.draft_info import DraftInfo


def through_the_wire(message: Message) -> Message:
    """Returns a message as it arrives, without the tensor that it announces."""
    frame, *behind = pack(message)
    received = unpack(frame.clone())
    assert isinstance(received.payload, torch.Tensor) == bool(behind)
    if behind:
        received.payload = read_json(behind[0].numpy().tobytes())
    return received


class PackingChannel:
    """
    One end of a pair within a process, with the contract of [`~hf_ssd.distributed.transport.Channel`]. Payloads travel
    through host memory. `while_waiting` is called when a message is waited for, so that the other side can work.
    """

    awake, pending = 0.0, ()  # nothing is lost by an exception

    def __init__(self, other: "PackingChannel | None" = None):
        self.incoming: deque[Message] = deque()
        self.other = type(self)(self) if other is None else other
        self.promised: Message | None = None
        self.while_waiting: Callable[[], None] = lambda: None

    def send(self, message: Message) -> None:
        received = through_the_wire(message)
        self.promised = received.announces
        self.other.incoming.append(received)

    def send_announced(self, payload: torch.Tensor) -> None:
        self.promised.payload = payload.cpu()
        self.other.incoming.append(self.promised)

    def receive(self, timeout: float) -> Message:
        if not self.incoming:
            self.while_waiting()
        if not self.incoming:
            raise TimeoutError("no message came in time")
        return self.incoming.popleft()

    def has_arrived(self) -> bool:
        return False  # an outcome arrives when all has been prepared

    def expect(self) -> None:
        """Does nothing: a message can arrive at any time."""

    def close(self) -> None:
        """Does nothing: there is nothing to free."""

    def make_room(self, rows: int, vocab_size: int, features: int = 0) -> None:
        """Does nothing: no memory is allocated for a message."""


class Loopback:
    """
    With the interface of [`~hf_ssd.distributed.worker_process.WorkerProcess`] that sessions use. It works while the
    target waits for it, within the context manager that `during_work` returns.
    """

    is_alive = is_ready = is_running = True
    is_starting, error = False, None

    def __init__(self, model, during_work=contextlib.nullcontext):
        self.own_end = PackingChannel()
        self.channel = SharedChannel(self.own_end, self)
        self.server = DraftServer(self.own_end.other, model)
        self.own_end.while_waiting = self.work
        info = dataclasses.asdict(DraftInfo.of(model.config))
        self.during_work, self.worker_info = during_work, {"draft": info, "identity": None, "device": "cpu"}

    def work(self) -> None:
        """Handles the messages that the target has sent. Raises the draft's exceptions as [`DraftError`]."""
        try:
            with self.during_work():
                while self.own_end.other.incoming:
                    self.server.handle(self.own_end.other.receive(0.0))
                    while (growing := self.server.growing) is not None:
                        self.server.grow(growing)
        except Exception as error:
            raise DraftError(f"The draft raised {type(error).__name__}: {error}") from error

    def stderr_tail(self) -> str:
        return ""

    def end(self) -> None:
        """Drops what the draft keeps for the call, which the two ends would keep from being freed at once."""
        if self.server is not None:
            self.server.calls.clear()
        self.own_end.other.other = self.own_end.while_waiting = self.server = None

    cancel = end


def assistant_of(model, during_work) -> DraftAssistant:
    """Returns an assistant with such a worker for one call."""
    assistant = DraftAssistant([], wait=False)
    assistant.workers.append(Loopback(model, during_work))
    assistant.info = DraftInfo.of(model.config)
    return assistant
