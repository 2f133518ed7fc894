"""A draft worker that the target's own process has started."""

import socket
import time
from datetime import timedelta

import torch.distributed as dist

from .connection import Connection
from .groups import LOOPBACK, keep_when_forked
from .process import STOP_TIMEOUT, WorkerProcess


class ChildWorker(Connection):
    """
    Started at once, so that several can start side by side, and then to be connected. The store of the two listens on
    loopback, on a port that the system picks.

    Args:
        settings (`dict`): What [`~hf_ssd.distributed.worker`] reads. `timeout` bounds the start, in seconds.
        descriptor (`int`, *optional*): File descriptor of shared weights that the worker inherits.

    Attributes:
        process ([`WorkerProcess`]): The process.
    """

    def __init__(self, settings: dict, descriptor: int | None = None):
        super().__init__()
        self.timeout = settings["timeout"]
        self.deadline = time.monotonic() + self.timeout
        self.listener = socket.create_server((LOOPBACK, 0))
        self.port = self.listener.getsockname()[1]
        store = {"host": LOOPBACK, "port": self.port, "prefix": "", "hostname": LOOPBACK}
        self.process = WorkerProcess({**settings, "store": store}, descriptor)

    def connect(self) -> None:
        try:
            store = dist.TCPStore(
                LOOPBACK,
                self.port,
                is_master=True,
                timeout=timedelta(seconds=self.timeout),
                wait_for_workers=False,
                master_listen_fd=self.listener.detach(),
            )
            keep_when_forked(store)
            self._connect(dist.PrefixStore("", store), LOOPBACK, self.deadline)
        except BaseException:
            self.kill()
            raise

    @property
    def is_alive(self) -> bool:
        return self.channel is not None and self.process.is_running

    def last_words(self) -> str:
        return self.process.last_words()

    def end(self) -> None:
        self.process.end()

    def stop(self) -> None:
        if self.is_alive:
            self._say_stop()
            self.process.wait(STOP_TIMEOUT)
        self.kill()

    def _has_ended(self) -> bool:
        return not self.process.is_running
