"""A target's connection to a draft worker, however that was started."""

import time
from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from transformers.utils import logging

from .. import devices
from . import messages, payloads
from .channel import Channel, PeerLost
from .device_link import LINK_TIMEOUT
from .messages import Kind, Message, ProtocolError
from .session import DraftError

logger = logging.get_logger(__name__)

# Keys of the store. The worker sets the one when its model is loaded, the target the other when it comes to fetch it;
# then both build their ends of the channel, which blocks until the other does the same.
DRAFT_IS_HERE, TARGET_IS_HERE = "draft", "target"


class Connection(ABC):
    """
    Attributes:
        channel ([`Channel`], *optional*): To the worker, once it is connected.
        secret (`bytes`): What only the worker and this process know; empty where nobody could tell both of them.
        facts (`dict`): What the worker says of itself: `vocab_size` and `device` of its model, the `identity` of that
            device, its `pid`, and whether the model `is_compiled`, or, if it was to be and is not,
            `uncompiled_because`.
    """

    def __init__(self):
        self.channel: Channel | None = None
        self.secret = b""
        self.facts: dict = {}
        self.link_was_tried = False

    @abstractmethod
    def connect(self) -> None:
        """
        Waits until the worker has loaded its model.

        Raises:
            [`DraftError`]: it could not start; the worker's own words are in the message.
        """

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether the worker is connected and its process runs."""

    @abstractmethod
    def last_words(self) -> str:
        """Returns the end of what the worker wrote to its standard error."""

    @abstractmethod
    def end(self) -> None:
        """Ends the worker's process at once, and leaves the channel to who uses it. May be called more than once."""

    def kill(self) -> None:
        """Ends the worker at once. May be called more than once."""
        self.end()  # first: a channel whose other end lives cannot be closed
        if self.channel is not None:
            channel, self.channel = self.channel, None
            channel.close()

    @abstractmethod
    def stop(self) -> None:
        """Lets the worker end by itself, or kills it if it does not."""

    def link_gpus(self, device: torch.device) -> None:
        """Opens a link between two different GPUs. Tried once; without it, host memory serves."""
        both_are_gpus = device.type == torch.device(self.facts["device"]).type == "cuda"
        if both_are_gpus and not self.is_on(device) and not self.link_was_tried:
            self.open_link(device)

    def is_on(self, device: torch.device) -> bool:
        """Whether the worker's model is on the same accelerator as something of this process."""
        identity = devices.identity(device)
        return identity is not None and identity == self.facts["identity"]

    def open_link(self, device: torch.device) -> bool:
        """
        Opens a link from the worker's device to this one, and tells whether it works.

        Raises:
            [`DraftError`]: the worker does not answer.
        """
        self.link_was_tried = True
        self.channel.send(Message(Kind.LINK))
        works, deadline = self.channel.open_link(device), time.monotonic() + LINK_TIMEOUT
        try:
            while (message := self.channel.receive(max(0.0, deadline - time.monotonic()))).kind != Kind.LINK:
                pass  # late answers of an earlier call
            works = works and payloads.payload_to_json(message.payload)
        except (TimeoutError, PeerLost, ProtocolError) as error:
            raise DraftError(f"The draft worker did not open its end of a link. {self.last_words()}") from error
        self.channel.send(Message(Kind.LINK, payload=payloads.json_to_payload(works)))
        if not works:
            self.channel.close_link()
        return works

    def _connect(self, store: dist.Store, hostname: str | None, deadline: float) -> None:
        """
        Args:
            store (`torch.distributed.Store`): Where the two processes find each other.
            hostname (`str`, *optional*): See [`Channel`].
            deadline (`float`): By `time.monotonic()`.
        """
        while not store.check([DRAFT_IS_HERE]):
            self._check_start(deadline)
            time.sleep(0.01)
        store.set(TARGET_IS_HERE, "yes")
        try:
            self.channel = Channel(store, is_target=True, hostname=hostname, secret=self.secret)
            self.channel.prove()
        except RuntimeError as error:
            raise DraftError(f"The draft worker did not connect: {error}\n{self.last_words()}") from error
        while True:
            try:
                message = self.channel.receive(timeout=0.2)
                break
            except TimeoutError:
                self._check_start(deadline)
            except PeerLost:
                raise DraftError(f"The draft worker ended while it started.\n{self.last_words()}") from None
        if message.kind == Kind.ERROR:
            raise DraftError(f"The draft worker could not load its model.\n{payloads.payload_to_text(message.payload)}")
        messages.expect(message, Kind.READY, 0, 0)
        self.facts = payloads.payload_to_json(message.payload)
        if self.facts["uncompiled_because"]:
            logger.warning(f"The draft runs without torch.compile: {self.facts['uncompiled_because']}")

    def _check_start(self, deadline: float) -> None:
        if self._has_ended():
            raise DraftError(f"The draft worker ended while it started.\n{self.last_words()}")
        if time.monotonic() > deadline:
            raise DraftError("The draft worker was not ready in time.")

    @abstractmethod
    def _has_ended(self) -> bool:
        """Whether the process is known to have ended."""

    def _say_stop(self) -> None:
        if self.channel is not None:
            self.channel.send(Message(Kind.STOP))
