"""A draft worker in the target's process, whose messages are packed as on their way to another process."""

import contextlib

from hf_ssd.distributed.assistant import DraftAssistant
from hf_ssd.distributed.local import LocalChannel, LocalWorker
from hf_ssd.distributed.wire import Message, pack, unpack
from hf_ssd.drafting.needs import DraftInfo


class PackingChannel(LocalChannel):
    """Payloads travel through host memory, as between processes."""

    copies = True

    def has_arrived(self) -> bool:
        return False  # an outcome arrives when all has been prepared

    def send(self, message: Message) -> None:
        frame, *behind = pack(message)
        received = unpack(frame)
        if behind:
            received.payload.copy_(behind[0])
        super().send(received)

    def send_announced(self, payload) -> None:
        super().send_announced(payload.cpu())


class Loopback(LocalWorker):
    """
    Args:
        model (`PreTrainedModel`): The draft model.
        during_work (`Callable`, *optional*): Returns a context manager, in which the worker works.
    """

    is_ready, is_starting, error = True, False, None

    def __init__(self, model, during_work=contextlib.nullcontext):
        super().__init__(model, channel=PackingChannel())
        self.during_work, self.worker_info = during_work, {"identity": None, "device": "cpu"}

    def work(self) -> None:
        with self.during_work():
            super().work()

    def cancel(self) -> None:
        self.kill()

    def is_on(self, device) -> bool:
        return False


def assistant_of(model, during_work) -> DraftAssistant:
    """Returns an assistant with such a worker for one call."""
    assistant = DraftAssistant([], wait=False)
    assistant.workers.append(Loopback(model, during_work))
    assistant.info = DraftInfo.of(model.config)
    return assistant
