"""Distributions that tokens were drawn from, straight from the draft's GPU to the target's."""

import contextlib
import threading
import time

import torch
import torch.distributed as dist
from transformers.utils import logging

from .groups import DRAFT, TARGET, broadcast, give_up, gloo_group, nccl_group
from .wire import Kind, Message

logger = logging.get_logger(__name__)

LINK_TIMEOUT = 60.0  # seconds to open a link
POLL = 2e-5  # seconds between two looks at a transfer


class DeviceLink:
    """
    A one-way connection with a communicator of its own, and on the target's side a stream of its own, so that what
    arrives waits neither behind the target's all-reduces nor behind the forward pass that is queued already.

    A kernel on the draft's GPU waits until what was sent is received, so both sides must receive it or abort the link:
    otherwise nothing else runs on that GPU again.

    Args:
        store (`torch.distributed.Store`): Where the two processes find each other.
        rank (`int`): `TARGET` or `DRAFT`.
        device (`torch.device`): The device of this side's model. On the CPU gloo takes NCCL's place.
        trial (`torch.FloatTensor`): Numbers that only the two sides know. They are sent once, to see whether the link
            works and whether it leads to the other side.
    """

    def __init__(self, store: dist.Store, rank: int, device: torch.device, trial: torch.FloatTensor):
        self.store, self.rank, self.device, self.trial = store, rank, device, trial
        self.stream: torch.cuda.Stream | None = None
        self.group: dist.ProcessGroup | None = None
        self.is_aborted = False

    def open(self) -> None:
        """
        Connects to the other side, which must do the same, and tries whether anything arrives.

        Raises:
            `RuntimeError`, `TimeoutError`: it does not.
        """
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device) if self.rank == TARGET else None
            with torch.cuda.device(self.device):
                self.group = nccl_group(self.store, "link", self.rank)
        else:
            self.group = gloo_group(self.store, "link", self.rank)
        if self.is_aborted:  # while it connected
            self.abort()
            raise RuntimeError("it took too long")
        self._try()

    def _try(self) -> None:
        deadline = time.monotonic() + LINK_TIMEOUT
        if self.rank == DRAFT:
            self.wait(self.send(self.trial.to(self.device)), deadline)
            return
        message = Message(Kind.PROBABILITIES, payload=torch.empty_like(self.trial))
        self.wait(self.receive(message), deadline)
        if not torch.equal(message.payload.cpu(), self.trial):
            raise RuntimeError("what arrived is not what was sent")

    def abort(self) -> None:
        """Ends what is under way on both devices, and the link. May be called more than once."""
        self.is_aborted = True
        groups, self.group = [self.group] if self.group is not None else [], None
        give_up(groups)

    def send(self, payload: torch.Tensor) -> dist.Work:
        """Starts to send, when the current stream has computed it."""
        with self._on_device():
            return broadcast(self.group, payload, DRAFT)

    def receive(self, message: Message) -> dist.Work:
        """Starts to receive the payload of a message, of which only the size is known."""
        with self._on_device():
            message.payload = torch.empty_like(message.payload, device=self.device)
            work = broadcast(self.group, message.payload, DRAFT)
        if self.stream is not None:
            message.payload.record_stream(torch.cuda.current_stream(self.device))
        return work

    @staticmethod
    def wait(work: dist.Work, deadline: float | None) -> None:
        """
        Raises:
            `TimeoutError`: it did not come by then (`time.monotonic()`). The next call goes on waiting.
            `RuntimeError`: it cannot come any more.
        """
        while not work.is_completed():
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError("what a message announced did not come in time")
            time.sleep(POLL)
        work.wait()

    @contextlib.contextmanager
    def _on_device(self):
        if self.device.type != "cuda":
            yield
        else:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):  # None: the current stream
                yield


def open_link(store: dist.Store, rank: int, device: torch.device, trial: torch.FloatTensor) -> DeviceLink | None:
    """
    Opens a link, while the other side does the same. If that fails, warns and returns `None`; host memory serves as
    well. It is tried in a thread, because NCCL can wait for ever for a peer that it does not reach.
    """
    link, failures = DeviceLink(store, rank, device, trial), ["it took too long"]

    def attempt():
        try:
            link.open()
            failures.clear()
        except Exception as error:
            failures[:] = [error]

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(LINK_TIMEOUT)
    if not failures:
        return link
    link.abort()
    logger.warning(f"Probabilities travel through host memory, for {device} does not reach its peer: {failures[0]}")
    return None
