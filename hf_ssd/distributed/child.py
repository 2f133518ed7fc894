"""A draft worker that the target's own process has started."""

import time

from .connection import Connection
from .groups import keep_when_forked
from .meeting import join, private_meeting, use_another_file
from .process import STOP_TIMEOUT, WorkerProcess


class ChildWorker(Connection):
    """
    Started at once, so that several can start side by side, and then to be connected. The two meet where no one else
    can, and share a secret: see [`~hf_ssd.distributed.meeting`] and [`~hf_ssd.distributed.proof`].

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
        self.meeting, descriptors = private_meeting()
        self.secret = bytes.fromhex(self.meeting["secret"])
        if descriptor is not None:
            descriptors = [*descriptors, descriptor]
        self.process = WorkerProcess({**settings, "meeting": self.meeting}, descriptors)

    def connect(self) -> None:
        try:
            store = keep_when_forked(join(self.meeting, self.timeout))
            self._connect(store, self.meeting["hostname"], self.deadline)
        except BaseException:
            use_another_file()
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
