"""What tokens were drawn from, straight from the draft's GPU to the target's."""

import contextlib
import threading
import time

import torch
import torch.distributed as dist
from transformers.utils import logging

from .groups import DRAFT, TARGET, broadcast, gloo_group, nccl_group
from .messages import Kind, Message

logger = logging.get_logger(__name__)

LINK_TIMEOUT = 60.0  # seconds to open a link
POLL = 2e-5  # seconds between two looks at a transfer
TRIAL = 8  # numbers that are sent once to see whether it works


class DeviceLink:
    """
    A one-way connection with a communicator of its own, and on the target's side a stream of its own, so that what
    arrives waits neither behind the target's all-reduces nor behind the forward pass that is queued already.

    A kernel on the draft's GPU waits until what was sent is taken, so both sides must see to it that it is.

    Args:
        store (`torch.distributed.Store`): Where the two processes find each other.
        rank (`int`): `TARGET` or `DRAFT`.
        device (`torch.device`): Of this side's model. On the CPU gloo takes NCCL's place.
    """

    def __init__(self, store: dist.Store, rank: int, device: torch.device):
        self.rank, self.device, self.stream = rank, device, None
        if device.type == "cuda":
            if rank == TARGET:
                self.stream = torch.cuda.Stream(device)
            with torch.cuda.device(device):
                self.group = nccl_group(store, "link", rank)
        else:
            self.group = gloo_group(store, "link", rank)
        self._try()

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

    def _try(self) -> None:
        deadline, numbers = time.monotonic() + LINK_TIMEOUT, torch.arange(TRIAL, dtype=torch.float32)
        if self.rank == DRAFT:
            self.wait(self.send(numbers.to(self.device)), deadline)
            return
        message = Message(Kind.PROBABILITIES, payload=torch.empty(TRIAL, dtype=torch.float32))
        self.wait(self.receive(message), deadline)
        if not torch.equal(message.payload.cpu(), numbers):
            raise RuntimeError("what arrived is not what was sent")

    @contextlib.contextmanager
    def _on_device(self):
        if self.device.type != "cuda":
            yield
        else:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):  # None: the current stream
                yield


def open_link(store: dist.Store, rank: int, device: torch.device) -> DeviceLink | None:
    """
    Opens a link, while the other side does the same. `None` if that fails; then there is a warning, and host memory
    serves as well. In a thread, because NCCL can wait for ever for a peer that it does not reach.
    """
    made, failure = [], ["it took too long"]

    def make():
        try:
            made.append(DeviceLink(store, rank, device))
        except Exception as error:
            failure[0] = str(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(LINK_TIMEOUT)
    if made:
        return made[0]
    logger.warning(f"Probabilities travel through host memory, for {device} does not reach its peer: {failure[0]}")
    return None


def gpu_identity(device: torch.device) -> str | None:
    """Returns what tells one GPU from all others, whatever numbers processes give them; `None` without a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
