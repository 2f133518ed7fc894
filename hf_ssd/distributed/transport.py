"""Messages between two processes over torch.distributed, with deadlines, and an error when the other side has ended.

Each direction is a gloo group of two ranks, and a message is a broadcast from one rank to the other. Unlike a receive,
an asynchronous broadcast can be polled, and a wait that timed out can be resumed without closing the connection.
"""

import contextlib
import ctypes
import gc
import os
import threading
import time
import weakref
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist

from ..config import LONGEST_LOOKAHEAD
from .wire import FRAME_LENGTH, LARGEST_PAYLOAD, Message, ProtocolError, pack, read_json, unpack

TARGET, DRAFT = 0, 1  # ranks
DIRECTIONS = ("to_draft", "to_target")
LOOPBACK = "127.0.0.1"
CONNECT_TIMEOUT = timedelta(seconds=20)  # for the other process to join; both processes are known to be running
# An idle worker waits as long as its program runs. Waits end by the caller's deadline, or with the other process.
TRANSFER_TIMEOUT = timedelta(days=365)
CLOSE_TIMEOUT = 5.0  # seconds
WAIT_SLICE = 0.1  # seconds; between two slices Python handles Ctrl-C
# Seconds in which a wait spins before it sleeps, because a core that slept is slow for a while. This is long enough for
# a round. Spinning slows the neighbouring cores and takes its own, so a wait for a message that is not expected soon,
# and one for a process that computes on the same cores, sleep at once.
AWAKE = 0.1


class PeerLost(ConnectionError):
    """The process at the other end of the channel has ended."""


class Channel:
    """One end of a two-way connection with the process that meets this one in `store`."""

    # In a `group` of more ranks the first rank, the target, sends to all others.
    def __init__(self, store: dist.Store | None, is_target: bool, hostname: str | None = LOOPBACK, group=None):
        self.largest = LARGEST_PAYLOAD  # elements that a received payload may have
        self.awake = AWAKE
        self.rank = TARGET if is_target else DRAFT
        keep_when_forked(self)
        to_draft, to_target = (group or gloo_group(store, name, self.rank, hostname) for name in DIRECTIONS)
        self.outgoing, self.incoming = (to_draft, to_target) if is_target else (to_target, to_draft)
        self.sent: deque[tuple[dist.Work, torch.Tensor]] = deque()
        # What is being received, the next frame or the payload of a message: an exception meanwhile has lost nothing.
        self.pending: tuple[dist.Work, torch.Tensor, Message | None] | None = None
        self.announced: Message | None = None  # the message whose payload comes next, if its header has come
        self.promised: Message | None = None  # by the last message that was sent

    def make_room(self, rows: int, vocab_size: int, features: int = 0) -> None:
        """Allows payloads as large as the longest distributions of these rows, or as so many features."""
        self.largest = max(self.largest, rows * LONGEST_LOOKAHEAD * vocab_size, features)

    def send(self, message: Message) -> None:
        """Starts to send a message, and returns at once. An announced payload must have been sent before."""
        if self.promised is not None:
            raise ProtocolError("a message cannot be sent in the place of the payload that was announced")
        while self.sent and self.sent[0][0].is_completed():
            self.sent.popleft()
        for tensor in pack(message):
            self._start(tensor)
        self.promised = message.announces
        _let_others_run()

    def send_announced(self, payload: torch.Tensor) -> None:
        self.promised = None
        self._start(payload.cpu().contiguous())
        _let_others_run()

    def _start(self, tensor: torch.Tensor) -> None:
        self.sent.append((broadcast(self.outgoing, tensor, self.rank), tensor))  # the tensor is kept until it has left

    def expect(self) -> None:
        """Starts to receive the next message, so that it can arrive while this process computes."""
        if self.pending is None:
            message, self.announced = self.announced, None
            tensor = torch.empty(FRAME_LENGTH, dtype=torch.uint8) if message is None else message.payload
            self.pending = broadcast(self.incoming, tensor, 1 - self.rank), tensor, message
        _let_others_run()

    def has_arrived(self) -> bool:
        """Whether the next message, which must be expected, has begun to arrive, or the other process has ended."""
        _let_others_run()
        return self.pending is not None and self.pending[0].is_completed()

    def receive(self, timeout: float) -> Message:
        """Returns the next message. A wait that has ended by `TimeoutError` is resumed by the next call."""
        deadline = time.monotonic() + timeout
        while True:
            if self.pending is None:
                self.expect()
            work, tensor, message = self.pending
            wait(work, deadline, self.awake)
            self.pending = None
            if message is None:
                message = unpack(tensor, self.largest)
                if isinstance(message.payload, torch.Tensor):  # JSON, which follows
                    self.announced = message
                    continue
            self.announced = message.announces
            if message.payload is tensor and tensor.dtype == torch.uint8:
                message.payload = read_json(tensor.numpy().tobytes())
            return message

    def close(self) -> None:
        """Closes both directions. If the other process may not receive all sent messages, it must have ended before."""
        groups = [group for group in (self.outgoing, self.incoming) if group is not None]
        self.outgoing = self.incoming = self.pending = None
        self.sent.clear()

        def give_up():
            while groups:
                groups.pop().abort()

        # In a thread, because a group that is collected as garbage waits for the other process, which may hang.
        closing = threading.Thread(target=give_up, daemon=True)
        try:
            closing.start()
        except RuntimeError:  # the program ends, and early versions of Python 3.12 start no threads then
            return give_up()
        closing.join(CLOSE_TIMEOUT)


def wait(work: dist.Work, deadline: float, awake: float = AWAKE) -> None:
    """Waits until a transfer is complete, without sleep for `awake` seconds. Ends with the other process, too."""
    asleep_at = min(time.monotonic() + awake, deadline)
    while not work.is_completed() and time.monotonic() < asleep_at:
        _let_others_run()
    while True:
        left = min(WAIT_SLICE, deadline - time.monotonic())
        completed = work.is_completed()  # read before the wait, because a message may come just as the wait times out
        try:
            work.wait(timedelta(seconds=max(left, 0.001)))
            return
        except RuntimeError as error:
            if completed:
                raise PeerLost(f"the connection was closed: {error}") from error
            if time.monotonic() >= deadline and not work.is_completed():
                raise TimeoutError("no message came in time") from None


# Gives other threads a turn on this core: a message leaves when gloo's thread runs. A system that has no other way puts
# the core to sleep for a tenth of a millisecond.
_let_others_run = getattr(os, "sched_yield", lambda: time.sleep(0))


# ---------------------------------------------------------------- groups of two ranks: a process of each side

_kept: weakref.WeakSet = weakref.WeakSet()


def keep_when_forked(thing):
    """Keeps it in forked children, where destructors of groups and stores wait for threads that are not there."""
    _kept.add(thing)
    return thing


def _keep() -> None:
    for thing in list(_kept):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    if _kept:  # earlier garbage may hold transfers and devices, which have no name here
        gc.freeze()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep)


def gloo_group(store: dist.Store, name: str, rank: int, hostname: str | None = LOOPBACK) -> dist.ProcessGroup:
    """Connects to the other process. Without a `hostname` gloo chooses an address that other machines can reach."""
    gloo = dist.ProcessGroupGloo
    options = keep_when_forked(gloo._Options())  # the options hold a device with a thread
    options._timeout, options._threads = CONNECT_TIMEOUT, 1
    with _threads_that_let_compute():
        is_far = hostname is None
        device = gloo.create_default_device() if is_far else gloo.create_device(hostname=hostname, lazy_init=False)
        options._devices = [device]
        return keep_when_forked(gloo(dist.PrefixStore(name, store), rank, 2, options))


@contextlib.contextmanager
def _threads_that_let_compute():
    """If the process has a single core, threads that are created in this block do not interrupt the one there."""
    # Otherwise gloo's receiving thread interrupts its sending thread and spins until the scheduler's next tick, which
    # takes a tenth of a draft's time.
    is_alone = hasattr(os, "SCHED_BATCH") and len(os.sched_getaffinity(0)) == 1
    is_alone = is_alone and os.sched_getscheduler(0) == os.SCHED_OTHER

    def follow(policy: str) -> None:
        with contextlib.suppress(OSError):  # some containers do not allow it
            if is_alone:
                os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))

    follow("SCHED_BATCH")
    try:
        yield
    finally:
        follow("SCHED_OTHER")


def broadcast(group: dist.ProcessGroup, tensor: torch.Tensor, root: int) -> dist.Work:
    """Starts to send `tensor` if this rank is `root`, otherwise to receive into it."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = root, 0, TRANSFER_TIMEOUT
    return group.broadcast([tensor], options)
