"""A draft worker in the target's process: the real session, messages and server, with a queue in the place of gloo."""

from collections import deque

import torch

from hf_ssd.distributed.draft_server import DraftServer
from hf_ssd.distributed.target_ranks import TargetRanks
from hf_ssd.distributed.wire import Message, pack, unpack
from hf_ssd.distributed.worker_session import WorkerSession
from hf_ssd.drafting.needs import DraftInfo


class End:
    """One end of a [`~hf_ssd.distributed.channel.Channel`]. A message is packed and unpacked as on its way."""

    link = None

    def __init__(self):
        self.incoming: deque[Message] = deque()
        self.other: End | None = None
        self.promised: Message | None = None
        self.before_receive = lambda: None

    def send(self, message: Message) -> None:
        frame, *behind = pack(message)
        received, payload = unpack(frame)
        if payload is not None and len(payload):
            received.payload.copy_(behind.pop(0))
        self.promised = received.announces
        self.other.incoming.append(received)

    def send_announced(self, payload: torch.Tensor) -> None:
        self.promised.payload.copy_(payload.cpu())
        self.other.incoming.append(self.promised)

    def receive(self, timeout: float | None, awake: float = 0.0) -> Message:
        self.before_receive()
        return self.incoming.popleft()

    def expect(self) -> None:
        pass

    def make_room(self, rows: int, vocab_size: int) -> None:
        pass

    def has_arrived(self) -> bool:
        return False


class Loopback:
    """
    A [`~hf_ssd.distributed.connection.Connection`] to a worker that works while the target waits for it.

    Args:
        model (`PreTrainedModel`): The draft model.
        on_work (`Callable`, *optional*): A context manager, in which the worker works.
    """

    is_alive, translation = True, None

    def __init__(self, model, during_work):
        self.channel, theirs = End(), End()
        self.channel.other, theirs.other = theirs, self.channel
        self.server, self.during_work = DraftServer(theirs, model), during_work
        self.channel.before_receive = self.work
        self.worker_info = {}

    def work(self) -> None:
        with self.during_work():
            while self.server.channel.incoming:
                self.server._handle(self.server.channel.incoming.popleft())

    def stderr_tail(self) -> str:
        return ""

    def kill(self) -> None:
        pass


class LoopbackAssistant:
    """Such a worker, as [`~hf_ssd.distributed.assistant.DraftAssistant`] gives it to calls."""

    cores = None

    def __init__(self, model, during_work):
        self.model, self.during_work, self.ranks, self.workers = model, during_work, TargetRanks(), [None]
        self.info = DraftInfo.of(model.config)

    def begin_call(self, turn, timeout, patience) -> None:
        pass

    def open_session(self, turn, request, device) -> WorkerSession:
        return WorkerSession(Loopback(self.model, self.during_work), 1, request())

    def end_call(self, turn) -> None:
        pass
