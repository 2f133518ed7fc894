"""Messages between two processes over torch.distributed, with deadlines, and an error when the other side has ended.

Each direction is a gloo group of two ranks, and a message is a broadcast from one rank to the other. Unlike a receive,
an asynchronous broadcast can be polled, and a wait that timed out can be resumed without closing the connection.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from ..config import LONGEST_LOOKAHEAD
from .device_link import DeviceLink, open_link
from .groups import DRAFT, LOOPBACK, TARGET, broadcast, give_up, gloo_group, keep_when_forked
from .meeting import link_trial
from .wire import FRAME_LENGTH, LARGEST_PAYLOAD, Message, ProtocolError, pack, unpack

WAIT_SLICE = 0.1  # seconds; between two slices Python handles Ctrl-C
# Seconds in which a wait spins before it sleeps, because a core that slept is slow for a while. This is long enough for
# a round. Spinning slows the neighbouring cores, so a wait for a message that is not expected soon sleeps at once.
AWAKE = 0.1


class PeerLost(ConnectionError):
    """The process at the other end of the channel has ended."""


class Channel:
    """
    One end of a two-way connection.

    Args:
        store (`torch.distributed.Store`): Where the two processes find each other.
        is_target (`bool`): Whether this is the target's end.
        hostname (`str`, *optional*, defaults to `"127.0.0.1"`): See [`~hf_ssd.distributed.groups.gloo_group`].
        secret (`bytes`, *optional*): Key that only the two processes know. See [`~hf_ssd.distributed.meeting`].
    """

    def __init__(self, store: dist.Store, is_target: bool, hostname: str | None = LOOPBACK, secret: bytes = b""):
        self.secret, self.largest = secret, LARGEST_PAYLOAD  # elements that a received payload may have
        self.store, self.rank = store, TARGET if is_target else DRAFT
        keep_when_forked(self)
        to_draft, to_target = (gloo_group(store, name, self.rank, hostname) for name in ("to_draft", "to_target"))
        self.outgoing, self.incoming = (to_draft, to_target) if is_target else (to_target, to_draft)
        self.sent: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self.expected: tuple[dist.Work, torch.Tensor] | None = None  # the next frame
        self.payload: tuple[Message, dist.Work] | None = None  # of a message whose frame has arrived
        self.announced: Message | None = None  # by the last message that was received
        self.promised: Message | None = None  # by the last message that was sent
        self.link: DeviceLink | None = None  # from the draft's GPU to the target's, once it is open

    def open_link(self, device: torch.device) -> bool:
        """Opens a link between the GPUs while the other process does the same, and returns whether it works."""
        self.link = open_link(self.store, self.rank, device, link_trial(self.secret))
        return self.link is not None

    def make_room(self, rows: int, vocab_size: int, features: int = 0) -> None:
        """
        Allows payloads as large as the distributions of the longest speculation of this many rows, and as so many
        numbers of features.
        """
        self.largest = max(self.largest, rows * LONGEST_LOOKAHEAD * vocab_size, features)

    def close_link(self) -> None:
        if self.link is not None:
            link, self.link = self.link, None
            link.abort()

    def send(self, message: Message) -> None:
        """
        Starts to send a message, and returns at once.

        Raises:
            [`~hf_ssd.distributed.wire.ProtocolError`]: the payload that the last message announced was not sent yet.
        """
        if self.promised is not None:
            raise ProtocolError("a message cannot be sent in the place of the payload that was announced")
        while self.sent and self.sent[0][0].is_completed():
            self.sent.popleft()
        frame, *payload = pack(message)
        self._start(frame, False)
        for tensor in payload:
            self._start(tensor, message.over_link)
        self.promised = message.announces
        _let_others_run()

    def send_announced(self, payload: torch.Tensor) -> None:
        """Starts to send the payload that the last message announced."""
        announced, self.promised = self.promised, None
        self._start(payload if announced.over_link else payload.cpu().contiguous(), announced.over_link)
        _let_others_run()

    def _start(self, tensor: torch.Tensor, over_link: bool) -> None:
        work = self.link.send(tensor) if over_link else broadcast(self.outgoing, tensor, self.rank)
        self.sent.append((work, tensor))  # the tensor is kept until it has left

    def flush(self, timeout: float) -> None:
        """Waits until all messages have left, at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.sent:
            self.wait(self.sent[0][0], deadline)
            self.sent.popleft()

    def expect(self) -> None:
        """Starts to receive the next message, so that it can arrive while this process computes."""
        if self.expected is not None or self.payload is not None:
            return
        if self.announced is not None:
            announced, self.announced = self.announced, None
            self._expect_payload(announced)
        else:
            frame = torch.empty(FRAME_LENGTH, dtype=torch.int64)
            self.expected = (broadcast(self.incoming, frame, 1 - self.rank), frame)
        _let_others_run()

    def _expect_payload(self, message: Message) -> None:
        if not message.over_link:
            work = broadcast(self.incoming, message.payload, 1 - self.rank)
        elif self.link is not None:
            work = self._over_link(self.link.receive, message)
        else:
            raise ProtocolError("a payload is to come over a link that was not opened")
        self.payload = (message, work)

    def has_arrived(self) -> bool:
        """Whether the next message, which must be expected, has begun to arrive, or the other process has ended."""
        _let_others_run()
        if self.payload is not None:
            return self.payload[1].is_completed()
        return self.expected is not None and self.expected[0].is_completed()

    def receive(self, timeout: float | None, awake: float = AWAKE) -> Message:
        """
        Returns the next message.

        Args:
            timeout (`float`, *optional*): Seconds. `None` waits as long as the other process lives.
            awake (`float`, *optional*): Seconds until the wait begins to sleep; 0 if no message is expected soon.

        Raises:
            `TimeoutError`: no message came in time. The next call continues to wait for the same message.
            [`PeerLost`]: the other process has ended.
            [`~hf_ssd.distributed.wire.ProtocolError`]: the received data is not a message of this protocol.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self.expect()
        if self.payload is None:
            work, frame = self.expected
            self.wait(work, deadline, awake)
            self.expected = None
            message, payload = unpack(frame, self.largest)
            self.announced = message.announces
            if payload is None or not len(payload):
                return message
            self._expect_payload(message)
        message, work = self.payload
        if message.over_link:
            self._over_link(self.link.wait, work, deadline)
        else:
            self.wait(work, deadline)
        self.payload = None
        return message

    @staticmethod
    def _over_link(step: Callable, *arguments):
        """Runs a step of the link. Its failure counts as the end of the other process and raises [`PeerLost`]."""
        try:
            return step(*arguments)
        except RuntimeError as error:
            raise PeerLost(f"the link between the GPUs failed: {error}") from error

    def close(self) -> None:
        """
        Closes both directions; may be called more than once. Waits of the other process end with [`PeerLost`]. If the
        other process may not receive all sent messages, it must have ended before, because gloo waits for them.
        """
        self.close_link()
        groups = [group for group in (self.outgoing, self.incoming) if group is not None]
        self.outgoing = self.incoming = self.expected = self.payload = None
        self.sent.clear()
        give_up(groups)

    @staticmethod
    def wait(work: dist.Work, deadline: float | None, awake: float = AWAKE) -> None:
        """Waits until a transfer is complete. See [`~Channel.receive`]."""
        asleep_at = time.monotonic() + awake
        if deadline is not None:
            asleep_at = min(asleep_at, deadline)
        while not work.is_completed() and time.monotonic() < asleep_at:
            _let_others_run()
        while True:
            left = WAIT_SLICE if deadline is None else min(WAIT_SLICE, deadline - time.monotonic())
            # Read before the wait, because a message may come just as the wait times out.
            completed = work.is_completed()
            try:
                work.wait(timedelta(seconds=max(left, 0.001)))
                return
            except RuntimeError as error:
                if completed:
                    raise PeerLost(f"the connection was closed: {error}") from error
                if deadline is not None and time.monotonic() >= deadline and not work.is_completed():
                    raise TimeoutError("no message came in time") from None


def _let_others_run() -> None:
    """
    Gives other threads and processes a turn on this core: a message that was handed to gloo leaves when gloo's thread
    runs. `time.sleep(0)` would put the core to sleep for a tenth of a millisecond.
    """
    if hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)
