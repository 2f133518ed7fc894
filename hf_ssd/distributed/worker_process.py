"""The process of a draft worker as the target's process holds it: started, connected, and never left behind."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from transformers.utils import logging

from . import payloads, wire
from .meeting import check_file, join, prove
from .sessions import DraftError
from .transport import Channel, PeerLost, keep_when_forked
from .wire import Kind, Message

logger = logging.get_logger(__name__)

STOP_TIMEOUT = 2.0  # seconds for a worker to end by itself before it is killed
CANCEL_TIMEOUT = 5.0  # seconds for a starting thread to notice that its worker was ended
POLL = 0.01  # polling interval in seconds
# Keys of the store. The worker sets the first key when its model is loaded or has failed to load. The target sets the
# second key when it has seen the first. Then both build their ends of the channel, which blocks until both do so.
DRAFT_IS_HERE, TARGET_IS_HERE = "draft", "target"


class WorkerProcess:
    """A draft worker. It starts in a thread of its own, and when its process has ended, another can take its place."""

    def __init__(self, launch: Callable, timeout: float):
        # Starts a process, and returns it (a `Child` or a `SupervisedChild`) and where it meets this process.
        self.launch, self.timeout = launch, timeout
        self.process = self.channel = self.thread = self.translation = None
        self.error: DraftError | None = None  # of the last start, until a call was told; then the worker `is_lost`
        self.worker_info: dict = {}  # see `run` in worker.py, where it is made
        self.is_lost = self.is_cancelled = False

    @property
    def is_starting(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the worker is connected and its process runs."""
        return self.channel is not None and self.process.is_running

    @property
    def is_ready(self) -> bool:
        return not self.is_starting and self.is_alive

    @property
    def takes_our_cores(self) -> bool:
        """Whether the draft computes on the cores of this process too while this process waits for it."""
        return self.worker_info.get("takes_cores", False)

    def stderr_tail(self) -> str:
        return self.process.stderr_tail()

    # ---------------------------------------------------------------- the start

    def begin(self) -> None:
        """Starts a process, and returns at once."""
        self.kill()
        self.translation = None
        self.thread = threading.Thread(target=self._start, daemon=True)
        self.thread.start()

    def take_error(self) -> DraftError | None:
        """Returns the error of the last start, and forgets it."""
        error, self.error = self.error, None  # a cycle with its traceback would keep the memory of the call
        return error

    def _start(self) -> None:
        try:
            self.deadline = time.monotonic() + self.timeout
            self.process, meeting = self.launch()
            if self.is_cancelled:
                self.process.end()
            try:
                self._connect(meeting)
            except BaseException:
                self.kill()
                check_file(meeting)
                raise
        except DraftError as error:
            self.error = error
        except Exception as error:
            self.error = DraftError(f"The draft worker could not be started: {error}")
            self.error.__cause__ = error

    def _connect(self, meeting: dict) -> None:
        """Waits until the worker has loaded its model, or raises [`DraftError`] with the worker's own message."""
        store = keep_when_forked(join(meeting, self.timeout))
        while not store.check([DRAFT_IS_HERE]):
            self._check_start()
            time.sleep(POLL)
        store.set(TARGET_IS_HERE, "yes")
        try:
            self.channel = self._channel(store, meeting)
            prove(self.channel)
        except RuntimeError as error:
            raise DraftError(f"The draft worker did not connect: {error}\n{self.stderr_tail()}") from error
        message = None
        while message is None:
            try:
                message = self.channel.receive(timeout=0.2)
            except TimeoutError:
                self._check_start()
            except PeerLost:
                raise self._early_end() from None
        if message.kind == Kind.ERROR:
            raise DraftError(f"The draft worker could not load its model: {payloads.read_text(message.payload)}")
        wire.expect(message, Kind.READY, 0, 0)
        self.worker_info = payloads.read_json(message.payload)
        if self.worker_info["uncompiled_because"]:
            logger.warning(f"The draft runs without torch.compile: {self.worker_info['uncompiled_because']}")

    def _channel(self, store, meeting: dict) -> Channel:
        """Connects in a thread, which is abandoned if the worker ends, because gloo keeps trying for minutes."""
        made = Future()

        def make(made: Future) -> None:
            try:
                made.set_result(Channel(store, True, meeting["hostname"], bytes.fromhex(meeting["secret"])))
            except Exception as error:
                made.set_exception(error.with_traceback(None))  # the traceback holds `made`

        thread = threading.Thread(target=make, args=[made], daemon=True)
        thread.start()
        while thread.is_alive():
            self._check_start()
            thread.join(POLL)
        try:
            return made.result(0)
        finally:
            del made  # an exception in `made` would be in a cycle with its traceback

    def _check_start(self) -> None:
        if not self.process.is_running:
            raise self._early_end()
        if time.monotonic() > self.deadline:
            raise DraftError("The draft worker was not ready in time.")

    def _early_end(self) -> DraftError:
        written = self.stderr_tail()
        cause = written.rpartition("\n")[2] or "it wrote nothing"  # the last line names an uncaught exception
        return DraftError(f"The draft worker ended while it started: {cause}\n{written}".strip())

    # ---------------------------------------------------------------- the end

    def end(self) -> None:
        """Ends the process at once. The call that uses the channel must close it. May be called more than once."""
        if self.process is not None:
            self.process.end()

    def kill(self) -> None:
        """Ends the process and the channel at once. May be called more than once."""
        self.end()  # first, because a channel to a live process cannot be closed
        if self.channel is not None:
            channel, self.channel = self.channel, None
            channel.close()

    def stop(self) -> None:
        """Lets the worker end by itself, or kills it if it does not."""
        if self.is_alive:
            self.channel.send(Message(Kind.STOP))
            self.process.wait(STOP_TIMEOUT)
        self.kill()

    def cancel(self) -> None:
        """Ends the worker for good, even while it starts. May be called more than once."""
        self.is_cancelled = True
        self.end()
        if self.is_starting and self.thread is not threading.current_thread():
            self.thread.join(CANCEL_TIMEOUT)  # the thread may use the channel
        self.kill()
