"""The process of one draft worker: started, and never left behind."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import weakref

STOP_TIMEOUT = 2.0  # seconds to end by itself before it is killed
KILL_TIMEOUT = 10.0  # seconds for the system to end it; it cannot while a driver holds it
STDERR_TAIL = 8000  # bytes that are shown of what a worker wrote
STDERR_LIMIT = 2**20  # bytes after which the worker keeps no more than those
# Variables of torchrun: the worker is not one of its ranks.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


class WorkerProcess:
    """
    A fresh interpreter, not a fork and not a `multiprocessing` child, so the user's script needs no `__main__` guard.
    It takes its settings from its standard input, and ends when that closes: however this process ends, the worker
    ends too.

    Args:
        settings (`dict`): What [`~hf_ssd.distributed.worker`] reads.
        descriptors (`list[int]`): File descriptors that the worker inherits.

    Attributes:
        popen (`subprocess.Popen`): The process.
        end (`Callable`): Kills it. May be called more than once, and is called when the program ends.
    """

    def __init__(self, settings: dict, descriptors: list[int]):
        environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
        if settings["cores"]:
            environment["OMP_NUM_THREADS"] = str(len(settings["cores"]))
        with standard_streams_taken():
            self.stderr = tempfile.TemporaryFile()
            # Both sides write at the end, wherever the other one has read.
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
        self.end = weakref.finalize(self, _end_process, os.getpid(), self.popen)
        with contextlib.suppress(BrokenPipeError):  # it has ended already; its standard error tells why
            self.popen.stdin.write(json.dumps(settings).encode() + b"\n")
            self.popen.stdin.flush()

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None

    def wait(self, timeout: float) -> bool:
        """Waits until it has ended by itself, at most `timeout` seconds, and returns whether it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout)
        return not self.is_running

    def stderr_tail(self) -> str:
        """Returns the end of what it wrote to its standard error."""
        return _tail(self.stderr.fileno()).decode("utf-8", errors="replace").strip()


@contextlib.contextmanager
def standard_streams_taken():
    """
    Takes those of the descriptors 0, 1 and 2 that are closed, as in a daemon, for the length of this block, so that
    nothing that is opened in it gets their numbers: in a child they are its standard streams.
    """
    taken = []
    try:
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            taken.append(descriptor)
        os.close(descriptor)
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)


def shorten_stderr() -> None:
    """Keeps this process's standard error, the file that [`WorkerProcess`] gave it, within its limit."""
    if os.fstat(2).st_size > STDERR_LIMIT:
        tail = _tail(2)
        os.ftruncate(2, 0)
        os.write(2, tail)


def _tail(descriptor: int) -> bytes:
    return os.pread(descriptor, STDERR_TAIL, max(0, os.fstat(descriptor).st_size - STDERR_TAIL))


def _end_process(parent: int, process: subprocess.Popen) -> None:
    if os.getpid() != parent:
        return  # this process was forked from it, and the worker is not its own
    process.kill()
    with contextlib.suppress(OSError):  # what it has not read is lost
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_TIMEOUT)
