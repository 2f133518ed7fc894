"""Sends the distributions of drafted tokens straight from the draft's GPU to the target's."""

import contextlib
import hmac
import threading
import time

import torch
import torch.distributed as dist
from accelerate.utils import patch_environment
from transformers.utils import logging

from .transport import DRAFT, TARGET, TRANSFER_TIMEOUT, Channel, broadcast, give_up, gloo_group
from .wire import Kind, Message

logger = logging.get_logger(__name__)

LINK_TIMEOUT = 60.0  # seconds to open a link
LINK_CTAS = 2  # blocks of the GPU that one transfer may use; distributions are a few megabytes
NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
POLL = 2e-5  # polling interval in seconds


class DeviceLink:
    """
    A one-way connection with its own communicator and, on the target's side, its own stream, so that a payload waits
    neither for the target's all-reduces nor for the forward pass that is already queued.

    A kernel on the draft's GPU waits until a sent payload is received, so the payload must be received or the link
    aborted. Otherwise no other kernel runs on that GPU again.

    Args:
        channel ([`Channel`]): The channel between the two processes.
        device (`torch.device`): The device of this side's model. On the CPU gloo takes NCCL's place.
    """

    def __init__(self, channel: Channel, device: torch.device):
        self.store, self.rank, self.device = channel.store, channel.rank, device
        # Numbers that only the two sides know. They are sent once, to check that the link leads to the other side.
        trial = hmac.digest(channel.secret, b"hf_ssd link", "sha256")
        self.trial = torch.tensor(list(trial), dtype=torch.float32)
        self.stream: torch.cuda.Stream | None = None
        self.group: dist.ProcessGroup | None = None
        self.is_aborted = False

    def open(self) -> None:
        """
        Connects to the other side, which must do the same, and sends the trial numbers over the link.

        Raises:
            `RuntimeError`, `TimeoutError`: the connection fails, or the trial numbers do not arrive.
        """
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device) if self.rank == TARGET else None
            with torch.cuda.device(self.device):
                self.group = nccl_group(self.store, "link", self.rank)
        else:
            self.group = gloo_group(self.store, "link", self.rank)
        if self.is_aborted:  # while this thread connected
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
        """Aborts the link and its transfers. May be called more than once."""
        self.is_aborted = True
        groups, self.group = [self.group] if self.group is not None else [], None
        give_up(groups)

    def send(self, payload: torch.Tensor) -> dist.Work:
        """Starts to send `payload` when the current stream has computed it."""
        with self._on_device():
            return broadcast(self.group, payload, DRAFT)

    def receive(self, message: Message) -> dist.Work:
        """Starts to receive the payload of a message into a new tensor on this device."""
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
            `TimeoutError`: the transfer is not complete at `deadline` (`time.monotonic()`). The next call continues to
                wait.
            `RuntimeError`: the transfer has failed.
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


def nccl_group(store: dist.Store, name: str, rank: int) -> dist.ProcessGroup:
    """Connects two GPUs with NCCL. Each process must have set its own GPU as the current device."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout, options.config.max_ctas = TRANSFER_TIMEOUT, LINK_CTAS
    # NCCL reads it while the group is made. Unless it is "0", the death of the draft's process would end the target's.
    with patch_environment(**{NCCL_ERRORS: "0"}):
        return dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, 2, options)


def open_link(channel: Channel, device: torch.device) -> bool:
    """
    Opens a link between the GPUs while the other process does the same, and returns whether it works. If it does not,
    distributions travel through host memory. The link is opened in a thread, because NCCL can wait for ever for an
    unreachable peer.
    """
    link, failures = DeviceLink(channel, device), ["it took too long"]

    def attempt():
        try:
            link.open()
            failures.clear()
        except Exception as error:
            failures[:] = [error]

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(LINK_TIMEOUT)
    if failures:
        link.abort()
        logger.warning(f"Probabilities travel through host memory, for {device} does not reach its peer: {failures[0]}")
    else:
        channel.link = link
    return not failures
