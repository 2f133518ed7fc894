"""The process of a draft worker as the target's process holds it: started, connected, and never left behind."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable

from transformers.utils import logging

from .meeting import check_file, join, private_meeting, prove, take_standard_streams
from .sessions import DraftError
from .shared_channel import SharedChannel
from .transport import Channel, keep_when_forked
from .weights import SharedWeights

logger = logging.get_logger(__name__)

CANCEL_TIMEOUT = 5.0  # seconds for a starting thread to notice that its worker was ended
POLL = 0.01  # polling interval in seconds
STDERR_TAIL = 8000  # bytes of a worker's standard error that are shown
STDERR_LIMIT = 2**20  # size in bytes at which a worker shortens its standard error to the tail
KILL_TIMEOUT = 10.0  # seconds for the system to end a killed worker; it cannot while a driver holds it
# How often an idle OpenMP thread looks for work before it sleeps: for 0.8 ms, measured on a virtual AMD EPYC, where a
# pass through 40 layers takes as long as by default. By default it keeps its core for 9 ms, when the target needs it.
SPINS = "10000"
# Variables of torchrun. They are removed because the worker is not a rank.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
# Keys of the store. The worker describes itself in the first key when its model is loaded, or says why that failed. The
# target sets the second key when it has read the first. Then both build their ends of the channel, which blocks until
# both do so.
DRAFT_IS_HERE, TARGET_IS_HERE = "draft", "target"


def check_system() -> None:
    if not hasattr(os, "fork"):
        raise ValueError(
            "A draft worker needs Linux or macOS. On Windows run the program under WSL, or pass the draft as a loaded "
            "model, which then drafts in turn with the target."
        )


class Child:
    """A fresh interpreter, which reads its settings from its standard input, and ends when that closes."""

    def __init__(self, settings: dict, weights: SharedWeights | None = None, meeting: dict | None = None):
        import fcntl  # Windows has no such module; see `check_system`

        self.meeting, descriptors = private_meeting() if meeting is None else (meeting, [])
        settings = {**settings, "meeting": self.meeting, "weights": None}
        if weights is not None:
            weights.fill()
            settings["weights"], descriptors = weights.description, [*descriptors, weights.descriptor]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
        if settings["cores"]:
            environment["OMP_NUM_THREADS"] = str(len(settings["cores"]["share"]))
            environment.setdefault("GOMP_SPINCOUNT", SPINS)
        take_standard_streams()
        self.stderr = tempfile.TemporaryFile()
        # Every write goes to the end of the file, wherever its shared offset is.
        fcntl.fcntl(self.stderr, fcntl.F_SETFL, os.O_APPEND)
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "hf_ssd.distributed.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.stderr,
            pass_fds=descriptors,
            env=environment,
            start_new_session=True,  # a Ctrl-C in the terminal is for the target
        )
        self.end = weakref.finalize(self, _end_process, os.getpid(), self.popen)  # may be called more than once
        with contextlib.suppress(BrokenPipeError):  # the worker has ended already; its standard error tells why
            self.popen.stdin.write(json.dumps(settings).encode() + b"\n")
            self.popen.stdin.flush()

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None

    def stderr_tail(self) -> str:
        return tail(self.stderr.fileno()).decode("utf-8", errors="replace").strip()


def _end_process(parent: int, process: subprocess.Popen) -> None:
    if os.getpid() != parent:
        return  # this is a forked child of `parent`, which does not own the worker
    process.kill()
    with contextlib.suppress(OSError):  # settings that the worker has not read are lost
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_TIMEOUT)


def tail(descriptor: int) -> bytes:
    return os.pread(descriptor, STDERR_TAIL, max(0, os.fstat(descriptor).st_size - STDERR_TAIL))


def shorten_stderr() -> None:
    """Keeps this process's standard error, a file that the target's process reads too, within its limit."""
    if os.fstat(2).st_size > STDERR_LIMIT:
        end = tail(2)
        os.ftruncate(2, 0)
        os.write(2, end)


class WorkerProcess:
    """A draft worker. It starts in a thread of its own, and when its process has ended, another can take its place."""

    def __init__(self, launch: Callable, timeout: float):
        self.launch, self.timeout = launch, timeout  # `launch` starts and returns a `Child` or a `SupervisedChild`
        self.process = self.thread = None
        self.channel: SharedChannel | None = None
        self.error: DraftError | None = None  # of the last start, until a call was told; then the worker `is_lost`
        self.worker_info: dict = {}  # see `run` in worker.py, where it is made
        self.is_lost = self.is_cancelled = False

    @property
    def is_starting(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    @property
    def is_alive(self) -> bool:
        channel = self.channel  # another thread may replace it
        return channel is not None and channel.is_alive

    @property
    def is_ready(self) -> bool:
        return not self.is_starting and self.is_alive

    def begin(self) -> None:
        """Starts a process, and returns at once."""
        self.is_lost = False
        self.kill()
        self.thread = threading.Thread(target=self._start, daemon=True)
        self.thread.start()

    def take_error(self) -> DraftError | None:
        """Returns the error of the last start for a call to tell, and forgets it."""
        error, self.error, self.is_lost = self.error, None, True
        return error  # a cycle with its traceback would keep the memory of the call

    def _start(self) -> None:
        try:
            self.deadline = time.monotonic() + self.timeout
            self.process = self.launch()
            if self.is_cancelled:
                self.process.end()
            try:
                self._connect()
            except BaseException:
                self.kill()
                check_file(self.process.meeting)
                raise
        except DraftError as error:
            self.error = error
        except Exception as error:
            self.error = DraftError(f"The draft worker could not be started: {error}")
            self.error.__cause__ = error

    def _connect(self) -> None:
        """Waits until the worker has loaded its model, or raises [`DraftError`] with the worker's own message."""
        meeting = self.process.meeting
        store = keep_when_forked(join(meeting, self.timeout))
        while not store.check([DRAFT_IS_HERE]):
            self._check_start()
            time.sleep(POLL)
        info = json.loads(store.get(DRAFT_IS_HERE))
        store.set(TARGET_IS_HERE, "yes")
        if "error" in info:
            raise DraftError(f"The draft worker could not load its model: {info['error']}")
        try:
            channel = self._connected(store, meeting["hostname"])
            self.channel = SharedChannel(channel, self.process)
            prove(channel, bytes.fromhex(meeting["secret"]))
        except RuntimeError as error:
            tail = self.process.stderr_tail()
            raise DraftError(f"The draft worker did not connect: {error}\n{tail}") from error
        self.worker_info = info
        if info["uncompiled_because"]:
            logger.warning(f"The draft runs without torch.compile: {info['uncompiled_because']}")

    def _connected(self, store, hostname: str | None) -> Channel:
        """Connects in a thread, which is abandoned if the worker ends, because gloo keeps trying for minutes."""
        made = []

        def make() -> None:
            try:
                made.append(Channel(store, True, hostname))
            except Exception as error:
                made.append(error.with_traceback(None))  # the traceback holds `made`

        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        while thread.is_alive():
            self._check_start()
            thread.join(POLL)
        if isinstance(made[0], Exception):
            raise made.pop()  # in no variable, because that would be in a cycle with the traceback
        return made[0]

    def _check_start(self) -> None:
        if not self.process.is_running:
            written = self.process.stderr_tail()
            cause = written.rpartition("\n")[2] or "it wrote nothing"  # the last line names an uncaught exception
            raise DraftError(f"The draft worker ended while it started: {cause}\n{written}".strip())
        if time.monotonic() > self.deadline:
            raise DraftError("The draft worker was not ready in time.")

    def kill(self) -> None:
        """Ends the process at once, and the channel, which its last session closes. May be called more than once."""
        if self.process is not None:
            self.process.end()
        if self.channel is not None:
            channel, self.channel = self.channel, None
            channel.leave(0, is_reusable=False)  # the number of no session

    def cancel(self) -> None:
        """Ends the worker for good, even while it starts. May be called more than once."""
        self.is_cancelled = True
        if self.process is not None:
            self.process.end()
        if self.is_starting and self.thread is not threading.current_thread():
            self.thread.join(CANCEL_TIMEOUT)  # the thread may use the channel
        self.kill()
