"""How target and draft find each other, and prove to each other who they are.

They share a secret, because gloo takes the first process that connects for the peer. Each side sends a fresh nonce over
its outgoing direction, and then the HMAC of both nonces, so a valid proof shows that both directions lead to the other
process. None can stand in the middle: one side connects to the address in a file that only the two can open. Under
torchrun the secret is empty.
"""

import atexit
import functools
import hmac
import os
import secrets
import shutil
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from . import wire
from .transport import LOOPBACK, Channel
from .wire import LARGEST_PAYLOAD, Kind, Message, ProtocolError

PROOF_TIMEOUT = 20.0  # seconds for the other side to prove itself, once both are connected
SECRET_LENGTH = NONCE_LENGTH = 32  # bytes, as an HMAC-SHA256 has


def private_meeting() -> tuple[dict, list[int]]:
    """Returns a meeting place with a secret, for JSON, and the file descriptors that the worker must inherit."""
    path, descriptors = _private_file()
    names = {"prefix": secrets.token_hex(8), "secret": secrets.token_hex(SECRET_LENGTH)}
    return {"path": path, "hostname": LOOPBACK, **names}, descriptors


def join(meeting: dict, timeout: float) -> dist.Store:
    """Returns the store of a meeting place, which waits up to `timeout` seconds for a key."""
    if "path" in meeting:
        store = dist.FileStore(meeting["path"])
    else:
        options = {"is_master": False, "wait_for_workers": False, "timeout": timedelta(seconds=timeout)}
        store = dist.TCPStore(meeting["host"], meeting["port"], **options)
    store.set_timeout(timedelta(seconds=timeout))
    return dist.PrefixStore(meeting["prefix"], store)


def check_file(meeting: dict) -> None:
    """Gives up the file if a failed worker has left half an entry, because every reader would wait for the rest."""
    path, _ = _private_file()
    if meeting.get("path") != path or not os.path.exists(path):
        return
    written, place, count = Path(path).read_bytes(), 0, 0
    while place < len(written):  # keys and values, each after its length
        place += 4 + int.from_bytes(written[place : place + 4], sys.byteorder)
        count += 1
    if place > len(written) or count % 2:
        _private_file.cache_clear()


def take_standard_streams() -> None:
    """Opens those of the descriptors 0 to 2 that are closed, as in a daemon: a child has its standard streams there."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def anonymous_file() -> int:
    """Returns the descriptor of a file in memory or, where there is none, of an unlinked temporary file."""
    take_standard_streams()
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hf_ssd")
    descriptor, path = tempfile.mkstemp(prefix="hf_ssd")
    os.unlink(path)
    return descriptor


@functools.cache
def _private_file() -> tuple[str, list[int]]:
    """Returns the path and the descriptors of the file for all meetings of this process."""
    if hasattr(os, "memfd_create"):
        descriptor = anonymous_file()  # never closed: torch opens it by this number when the last group is collected
        return f"/proc/self/fd/{descriptor}", [descriptor]
    folder = tempfile.mkdtemp(prefix="hf_ssd")  # no other user can enter it
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return os.path.join(folder, "meeting"), []


def prove(channel: Channel, secret: bytes) -> None:
    """Proves that this side knows the secret, while the other side does so too, or raises `ProtocolError`."""
    deadline, own = time.monotonic() + PROOF_TIMEOUT, secrets.token_bytes(NONCE_LENGTH)
    channel.largest = 0  # no memory is allocated for a peer that has not proved itself
    try:
        theirs = _exchange(channel, 0, own, deadline)
        answer = _exchange(channel, 1, _digest(secret, channel.rank, own, theirs), deadline)
    except (TimeoutError, ConnectionError, ValueError, TypeError) as error:
        raise ProtocolError(f"what has connected did not prove that it is the other side: {error}") from error
    if not hmac.compare_digest(answer, _digest(secret, 1 - channel.rank, theirs, own)):
        raise ProtocolError("what has connected does not know the secret of this worker and its target")
    channel.largest = LARGEST_PAYLOAD


def _digest(secret: bytes, sender: int, own: bytes, theirs: bytes) -> bytes:
    return hmac.digest(secret, bytes([sender]) + own + theirs, "sha256")


def _exchange(channel: Channel, step: int, value: bytes, deadline: float) -> bytes:
    channel.send(Message(Kind.PROOF, 0, step, value.hex()))
    message = channel.receive(deadline - time.monotonic())
    wire.expect(message, Kind.PROOF, 0, step)
    return bytes.fromhex(message.payload)
