"""Where a launched worker and its target find each other: in a file without a name, which only the two can open."""

import functools
import os
import secrets
import tempfile
from datetime import timedelta

import torch.distributed as dist

from .groups import LOOPBACK

SECRET_LENGTH = 32  # bytes


def private_meeting() -> tuple[dict, list[int]]:
    """
    Returns a place for one worker and this process, with a secret that the two share, as plain objects that JSON can
    hold; and the file descriptors that the worker must inherit. The place goes to the worker over its standard input.
    """
    path, descriptors = _private_file()
    names = {"prefix": secrets.token_hex(8), "secret": secrets.token_hex(SECRET_LENGTH)}
    return {"path": path, "hostname": LOOPBACK, **names}, descriptors


def join(meeting: dict, timeout: float) -> dist.Store:
    """
    Returns the store of a meeting.

    Args:
        meeting (`dict`): What [`private_meeting`] returned, or [`~hf_ssd.distributed.supervisor.Notes.meeting`].
        timeout (`float`): Seconds.
    """
    if "path" in meeting:
        store = dist.FileStore(meeting["path"])
    else:
        store = dist.TCPStore(meeting["host"], meeting["port"], is_master=False, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=timeout))
    return dist.PrefixStore(meeting["prefix"], store)


def use_another_file() -> None:
    """For a worker that failed while it started: it may have left half an entry, which no one could read past."""
    _private_file.cache_clear()


@functools.cache
def _private_file() -> tuple[str, list[int]]:
    """
    One file for all meetings of this process. Its descriptor is never closed, because torch opens the file by the
    number of the descriptor, and does so whenever the last group that met there is collected as garbage; a file of the
    user's could have that number by then.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hf_ssd")
        return f"/proc/self/fd/{descriptor}", [descriptor]
    folder = tempfile.TemporaryDirectory(prefix="hf_ssd")  # no other user can enter it
    _folders.append(folder)
    return os.path.join(folder.name, "meeting"), []


_folders: list[tempfile.TemporaryDirectory] = []  # each is removed when the program ends
