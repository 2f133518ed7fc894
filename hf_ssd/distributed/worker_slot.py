"""The place of a worker in an assistant."""

import threading
from collections.abc import Callable

from .connection import Connection
from .session import DraftError

JOIN_TIMEOUT = 5.0  # seconds for a starting thread to notice that its worker was ended


class WorkerSlot:
    """
    Holds a worker of an assistant, which starts in its own thread. When it ends, another worker takes its place.

    Args:
        start (`Callable`): Starts a worker, and returns a [`Connection`] that is not connected yet.

    Attributes:
        worker ([`Connection`], *optional*): The last worker whose process was started.
        error ([`DraftError`], *optional*): The error of the last start if it failed, until a call was told.
        is_lost (`bool`): Whether the last start failed, and a call was told.
    """

    def __init__(self, start: Callable[[], Connection]):
        self.start, self.worker, self.error = start, None, None
        self.is_lost = self.is_cancelled = False
        self.thread: threading.Thread | None = None

    @property
    def is_starting(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    @property
    def is_ready(self) -> bool:
        return not self.is_starting and self.worker is not None and self.worker.is_alive

    def take_error(self) -> DraftError | None:
        """
        Returns the error of the last start, and forgets it. Where the error is raised, no variable or attribute may
        hold it: the exception would be in a cycle with its traceback, which keeps the memory of the call until Python
        collects cycles.
        """
        error, self.error = self.error, None
        return error

    def begin(self) -> None:
        """Starts a worker, and returns at once."""
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.worker = self.start()
            if self.is_cancelled:
                self.worker.end()
            self.worker.connect()
        except DraftError as error:
            self.error = error
        except Exception as error:
            self.error = DraftError(f"The draft worker could not be started: {error}")
            self.error.__cause__ = error

    def end(self) -> None:
        """Ends the worker, even while it starts. May be called more than once."""
        self.is_cancelled = True
        if self.worker is not None:
            self.worker.end()
        if self.is_starting and self.thread is not threading.current_thread():
            self.thread.join(JOIN_TIMEOUT)  # the thread may use the channel
        if self.worker is not None:
            self.worker.kill()
