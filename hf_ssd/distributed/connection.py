"""The target's connection to one draft worker, whoever started its process."""

import threading
import time
from concurrent.futures import Future

import torch
import torch.distributed as dist
from transformers.utils import logging

from .. import devices
from . import wire
from .channel import Channel, PeerLost
from .device_link import LINK_TIMEOUT
from .groups import keep_when_forked
from .meeting import check_file, join, prove
from .process import STOP_TIMEOUT
from .session import DraftError
from .wire import Kind, Message, ProtocolError

logger = logging.get_logger(__name__)

# Keys of the store. The worker sets the first key when its model is loaded or has failed to load. The target sets the
# second key when it has seen the first. Then both build their ends of the channel, which blocks until both do so.
DRAFT_IS_HERE, TARGET_IS_HERE = "draft", "target"
POLL = 0.01  # polling interval in seconds


class Connection:
    """
    Args:
        process ([`WorkerProcess`] or [`SupervisedProcess`]): The process of the worker.
        meeting (`dict`): The place where worker and target find each other. See [`~hf_ssd.distributed.meeting.join`].
        timeout (`float`): Seconds until the worker must be ready.

    Attributes:
        channel ([`Channel`], *optional*): The channel to the worker, while it is connected.
        worker_info (`dict`): The fields of [`~hf_ssd.drafting.needs.DraftInfo`] for the worker's model (`draft`), its
            `device`, the `identity` of that device, the worker's `pid`, whether the model `is_compiled`, and the reason
            if compiling failed (`uncompiled_because`).
    """

    def __init__(self, process, meeting: dict, timeout: float):
        self.process, self.meeting, self.timeout = process, meeting, timeout
        self.deadline = time.monotonic() + timeout
        self.channel: Channel | None = None
        self.worker_info: dict = {}
        self.link_was_tried = False
        self.translation = None  # the last token translation that was sent to the worker

    def connect(self) -> None:
        """
        Waits until the worker has loaded its model.

        Raises:
            [`DraftError`]: the worker could not start. The error contains the worker's own message.
        """
        try:
            self._connect()
        except BaseException:
            self.kill()
            check_file(self.meeting)
            raise

    def _connect(self) -> None:
        store = keep_when_forked(join(self.meeting, self.timeout))
        while not store.check([DRAFT_IS_HERE]):
            self._check_start()
            time.sleep(POLL)
        store.set(TARGET_IS_HERE, "yes")
        try:
            self.channel = self._channel(store)
            prove(self.channel)
        except RuntimeError as error:
            raise DraftError(f"The draft worker did not connect: {error}\n{self.stderr_tail()}") from error
        message = None
        while message is None:
            try:
                message = self.channel.receive(timeout=0.2)
            except TimeoutError:
                self._check_start()
            except PeerLost:
                raise self._early_end() from None
        if message.kind == Kind.ERROR:
            raise DraftError(f"The draft worker could not load its model: {wire.read_text(message.payload)}")
        wire.expect(message, Kind.READY, 0, 0)
        self.worker_info = wire.read_json(message.payload)
        if self.worker_info["uncompiled_because"]:
            logger.warning(f"The draft runs without torch.compile: {self.worker_info['uncompiled_because']}")

    def _channel(self, store: dist.Store) -> Channel:
        """Connects in a thread, which is abandoned if the worker ends, because gloo keeps trying for minutes."""
        made = Future()

        def make(made: Future) -> None:
            try:
                secret = bytes.fromhex(self.meeting["secret"])
                made.set_result(Channel(store, is_target=True, hostname=self.meeting["hostname"], secret=secret))
            except Exception as error:
                made.set_exception(error.with_traceback(None))  # the traceback holds `made`

        thread = threading.Thread(target=make, args=[made], daemon=True)
        thread.start()
        while thread.is_alive():
            self._check_start()
            thread.join(POLL)
        try:
            return made.result(0)
        finally:
            del made  # an exception in `made` would be in a cycle with its traceback

    def _check_start(self) -> None:
        if not self.process.is_running:
            raise self._early_end()
        if time.monotonic() > self.deadline:
            raise DraftError("The draft worker was not ready in time.")

    def _early_end(self) -> DraftError:
        written = self.stderr_tail()
        cause = written.rpartition("\n")[2] or "it wrote nothing"  # the last line names an uncaught exception
        return DraftError(f"The draft worker ended while it started: {cause}\n{written}".strip())

    @property
    def is_alive(self) -> bool:
        """Whether the worker is connected and its process runs."""
        return self.channel is not None and self.process.is_running

    def stderr_tail(self) -> str:
        """Returns the end of the worker's standard error."""
        return self.process.stderr_tail()

    def end(self) -> None:
        """Ends the process at once. The call that uses the channel must close it. May be called more than once."""
        self.process.end()

    def kill(self) -> None:
        """Ends the process and the channel at once. May be called more than once."""
        self.end()  # first, because a channel to a live process cannot be closed
        if self.channel is not None:
            channel, self.channel = self.channel, None
            channel.close()

    def stop(self) -> None:
        """Lets the worker end by itself, or kills it if it does not."""
        if self.is_alive:
            self.channel.send(Message(Kind.STOP))
            self.process.wait(STOP_TIMEOUT)
        self.kill()

    # ---------------------------------------------------------------- links between GPUs

    def is_on(self, device: torch.device) -> bool:
        """Whether the worker's model is on this accelerator."""
        identity = devices.identity(device)
        return identity is not None and identity == self.worker_info["identity"]

    def link_gpus(self, device: torch.device) -> None:
        """Opens a link between two different GPUs. Tried once; without a link, data travels through host memory."""
        both_are_gpus = device.type == torch.device(self.worker_info["device"]).type == "cuda"
        if both_are_gpus and not self.is_on(device) and not self.link_was_tried:
            self.open_link(device)

    def open_link(self, device: torch.device) -> bool:
        """
        Opens a link from the worker's device to `device`, and returns whether it works.

        Raises:
            [`DraftError`]: the worker does not answer, or its answer is invalid.
        """
        self.link_was_tried = True
        self.channel.send(Message(Kind.LINK))
        works, deadline = self.channel.open_link(device), time.monotonic() + LINK_TIMEOUT
        try:
            while (message := self.channel.receive(max(0.0, deadline - time.monotonic()))).kind != Kind.LINK:
                pass  # late answers of an earlier call
            works = works and wire.read_json(message.payload)
        except (TimeoutError, PeerLost, ProtocolError) as error:
            raise DraftError(f"The draft worker did not open its end of a link. {self.stderr_tail()}") from error
        self.channel.send(Message(Kind.LINK, payload=wire.write_json(works)))
        if not works:
            self.channel.close_link()
        return works
