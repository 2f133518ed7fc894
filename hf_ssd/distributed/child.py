"""The process of a draft worker as a child of the target's process, and the files without a name that they share."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import weakref

STDERR_TAIL = 8000  # bytes of a worker's standard error that are shown
STDERR_LIMIT = 2**20  # size in bytes at which a worker shortens its standard error to the tail
KILL_TIMEOUT = 10.0  # seconds for the system to end a killed worker; it cannot while a driver holds it
# How often an idle OpenMP thread looks for work before it sleeps: for 0.8 ms, measured on a virtual AMD EPYC, where a
# pass through 40 layers takes as long as by default. By default it keeps its core for 9 ms, when the target needs it.
SPINS = "10000"
# Variables of torchrun. They are removed because the worker is not a rank.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


def check_system() -> None:
    """Raises `ValueError` where no worker can be started."""
    if not hasattr(os, "fork"):
        raise ValueError(
            "A draft worker needs Linux or macOS. On Windows run the program under WSL, or pass the draft as a loaded "
            "model, which then drafts in turn with the target."
        )


class Child:
    """
    A fresh interpreter, so the user's script needs no `__main__` guard. It reads its settings from its standard input,
    and ends when that closes, however this process ends. `end` kills it, and may be called more than once.
    """

    def __init__(self, settings: dict, descriptors: list[int]):
        import fcntl  # Windows has no such module; see `check_system`

        environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
        if settings["cores"]:
            environment["OMP_NUM_THREADS"] = str(len(settings["cores"]))
            environment.setdefault("GOMP_SPINCOUNT", SPINS)
        with standard_streams_taken():
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
        self.end = weakref.finalize(self, _end_process, os.getpid(), self.popen)
        with contextlib.suppress(BrokenPipeError):  # the worker has ended already; its standard error tells why
            self.popen.stdin.write(json.dumps(settings).encode() + b"\n")
            self.popen.stdin.flush()

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None

    def wait(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds until the process has ended by itself, and returns whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout)
        return not self.is_running

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


# ---------------------------------------------------------------- files


@contextlib.contextmanager
def standard_streams_taken():
    """
    Opens those of the descriptors 0, 1 and 2 that are closed, as in a daemon, for the length of this block, so that no
    file that is opened in the block gets their numbers: in a child these are the standard streams.
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


def anonymous_file() -> int:
    """Returns the descriptor of a file in memory or, where there is none, of an unlinked temporary file."""
    with standard_streams_taken():
        if hasattr(os, "memfd_create"):
            return os.memfd_create("hf_ssd")
        descriptor, path = tempfile.mkstemp(prefix="hf_ssd")
        os.unlink(path)
        return descriptor


def tail(descriptor: int) -> bytes:
    return os.pread(descriptor, STDERR_TAIL, max(0, os.fstat(descriptor).st_size - STDERR_TAIL))


def shorten_stderr() -> None:
    """Keeps this process's standard error, a file that the target's process reads too, within its limit."""
    if os.fstat(2).st_size > STDERR_LIMIT:
        end = tail(2)
        os.ftruncate(2, 0)
        os.write(2, end)
