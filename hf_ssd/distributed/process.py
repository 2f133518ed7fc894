"""The process of one draft worker: started, and never left behind."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import weakref

STOP_TIMEOUT = 2.0  # seconds to end by itself before it is killed
KILL_TIMEOUT = 10.0  # seconds for the system to end it; it cannot while a driver holds it
STDERR_TAIL = 8000  # bytes
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
        self.stderr = tempfile.TemporaryFile()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
        if settings["cores"]:
            environment["OMP_NUM_THREADS"] = str(len(settings["cores"]))
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
        self.stderr.seek(0)
        return self.stderr.read()[-STDERR_TAIL:].decode("utf-8", errors="replace").strip()


def _end_process(parent: int, process: subprocess.Popen) -> None:
    if os.getpid() != parent:
        return  # this process was forked from it, and the worker is not its own
    process.kill()
    with contextlib.suppress(OSError):  # what it has not read is lost
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_TIMEOUT)
