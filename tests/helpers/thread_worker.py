"""A draft worker in a thread of this process, behind a real channel, which a test can watch and change."""

import contextlib
import dataclasses
import threading

from hf_ssd.distributed.draft_server import DraftServer
from hf_ssd.distributed.shared_channel import SharedChannel
from hf_ssd.distributed.transport import PeerLost
from hf_ssd.distributed.wire import Kind, Message, ProtocolError
from hf_ssd.distributed.worker_process import WorkerProcess
from hf_ssd.drafting.draft_info import DraftInfo

from .channels import channel_ends

STOP = Kind.PROOF  # which a server is never sent otherwise


class StoppableServer(DraftServer):
    """A server in a thread, which cannot be killed: it ends when it is sent `STOP`."""

    def handle(self, message):
        if message.kind == STOP:
            raise PeerLost
        super().handle(message)


class ThreadWorker(WorkerProcess):
    meeting = {}  # it meets nobody

    def __init__(self, draft):
        super().__init__(launch=lambda: self, timeout=60.0)  # it is its own process
        self.draft, self.server = draft, None
        self.sent: list[Message] = []  # by the target

    def _connect(self):
        self.own_end, self.other_end = channel_ends()
        self.channel = SharedChannel(self.own_end, self)
        info = dataclasses.asdict(DraftInfo.of(self.draft.config))
        self.worker_info = {"draft": info, "device": "cpu", "identity": None}
        send = self.own_end.send
        self.own_end.send = lambda message: (self.sent.append(message), send(message))
        self.server = threading.Thread(target=self.serve, daemon=True)
        self.server.start()

    def serve(self):
        with contextlib.suppress(PeerLost):
            StoppableServer(self.other_end, self.draft).serve()

    is_running = property(lambda self: self.server is not None)

    def stderr_tail(self):
        return ""

    def end(self):
        if self.is_running:
            self.own_end.send(Message(STOP))
            self.server.join(10)
            self.server = None
            # Gloo waits for what is left, also when it is only collected as garbage, so the last answer is taken first.
            with contextlib.suppress(TimeoutError, PeerLost, ProtocolError):
                while True:
                    self.own_end.receive(0.02)
            self.other_end.close()
