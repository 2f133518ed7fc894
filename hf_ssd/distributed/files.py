"""Files without a name, and the standard streams of a process."""

import contextlib
import os
import tempfile

STDERR_TAIL = 8000  # bytes of a worker's standard error that are shown
STDERR_LIMIT = 2**20  # size in bytes at which a worker shortens its standard error to the tail


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
