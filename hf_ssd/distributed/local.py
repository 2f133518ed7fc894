"""The draft in the target's own process: a transport, a worker and a session without another process."""

import contextlib
import dataclasses
import weakref
from collections import deque
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from ..drafting.drafts import Drafts
from ..rounds import IN_TURN, Plan
from .draft_server import DraftServer
from .sessions import DraftError, DraftSession, SessionRequest
from .several_drafts import open_session
from .wire import Kind, Message


class LocalChannel:
    """
    One end of a pair within a process, with the contract of [`~hf_ssd.distributed.transport.Channel`]. A message is
    handed over as it is: its payload stays on its device. `while_waiting` is called when a message is waited for, so
    that the other side can work.
    """

    copies, awake = False, 0.0

    def __init__(self, other: "LocalChannel | None" = None):
        self.incoming: deque[Message] = deque()
        self.other = type(self)(self) if other is None else other
        self.promised: Message | None = None
        self.while_waiting: Callable[[], None] = lambda: None

    def send(self, message: Message) -> None:
        self.promised = message.announces
        self.other.incoming.append(message)

    def send_announced(self, payload: torch.Tensor) -> None:
        self.promised.payload = payload
        self.other.incoming.append(self.promised)

    def receive(self, timeout: float | None) -> Message:
        if not self.incoming:
            self.while_waiting()
        if not self.incoming:
            raise TimeoutError("no message came in time")
        return self.incoming.popleft()

    def has_arrived(self) -> bool:
        return len(self.incoming) > 0

    def expect(self) -> None:
        """Does nothing: a message can arrive at any time."""

    def make_room(self, rows: int, vocab_size: int, features: int = 0) -> None:
        """Does nothing: no memory is allocated for a message."""


class LocalWorker:
    """
    A worker in this process, which works while the target waits for it, with the interface of
    [`~hf_ssd.distributed.worker_process.WorkerProcess`] that sessions use.
    """

    is_alive, takes_our_cores, translation = True, False, None

    def __init__(self, model: PreTrainedModel, channel: LocalChannel | None = None):
        self.channel = LocalChannel() if channel is None else channel
        self.server = DraftServer(self.channel.other, model, drafts=_drafts.setdefault(model, Drafts()))
        self.channel.while_waiting = self.work

    def work(self) -> None:
        """Handles the messages that the target has sent. Raises the draft's exceptions as [`DraftError`]."""
        waiting = self.server.channel.incoming
        if waiting and waiting[-1].kind == Kind.END:  # the answer to an outcome before it would not be read
            while len(waiting) > 1:
                waiting.popleft()
        try:
            while waiting:
                self.server.handle(self.server.channel.receive(0.0))
        except Exception as error:
            raise DraftError(f"The draft raised {type(error).__name__}: {error}") from error

    def session(self, request: SessionRequest) -> DraftSession:
        """Begins a call, and reads the prompts. The worker serves one call."""
        self.server.translation = self.translation = request.translation  # nothing has to be sent
        session = open_session([self], 1, request, self._end)
        try:
            self.work()
        except BaseException:
            self.kill()
            raise
        return session

    def _end(self) -> None:
        try:
            if self.server is not None:
                with contextlib.suppress(DraftError):  # the call has all its tokens
                    self.work()
        finally:
            self.kill()

    def stderr_tail(self) -> str:
        return ""

    def kill(self) -> None:
        """Drops what the draft keeps for the call, which the two ends would keep from being freed at once."""
        if self.server is not None:
            self.server.speculator = None  # it refers to a method of the server
        self.channel.other.other = self.channel.while_waiting = self.server = None


def local_session(model: PreTrainedModel, request: SessionRequest) -> DraftSession:
    """Begins a call in which the draft works in turn with the target, in this process. No outcomes are prepared."""
    plan = Plan(IN_TURN, request.plan.lookahead, request.plan.after_miss)
    return LocalWorker(model).session(dataclasses.replace(request, plan=plan))


_drafts: "weakref.WeakKeyDictionary[PreTrainedModel, Drafts]" = weakref.WeakKeyDictionary()
