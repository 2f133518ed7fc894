"""The draft ranks under torchrun: supervisors whose child does the work.

torchrun ends all ranks when one is killed, so a draft rank itself does nothing that could kill it. Its child is the
draft worker, which holds the GPU, and may die and be started again alone. Target and supervisor leave each other notes
in torchrun's store: which child is asked for, which one is to be killed, which has ended and with what last words.

There is no private pipe between ranks, so target and draft trust torchrun's store, and with it everyone who can reach
MASTER_ADDR:MASTER_PORT or the ports on which gloo and NCCL listen: whoever can may take a rank's place, be sent the
prompts and answer with tokens, and may do the same to the ranks of any other program that torchrun starts. As torchrun
itself, this is for a network, or a machine, whose users trust each other.
"""

import time
from datetime import timedelta

import torch.distributed as dist

from .connection import Connection
from .groups import LOOPBACK
from .process import STOP_TIMEOUT, WorkerProcess

POLL = 0.05  # seconds between two looks at the notes
SUPERVISOR_TIMEOUT = 3.0  # seconds for the supervisor to notice that its child has ended, or is to end
STORE_TIMEOUT = timedelta(seconds=60)


class Notes:
    """
    What target and supervisor of one draft rank write to each other.

    Args:
        host (`str`), port (`int`): Of torchrun's store.
        prefix (`str`): Of the keys of this run and this draft rank.
        on_one_machine (`bool`): Whether all ranks are, so that loopback serves them.
    """

    def __init__(self, host: str, port: int, prefix: str, on_one_machine: bool):
        self.host, self.port, self.prefix = host, port, prefix
        self.hostname = LOOPBACK if on_one_machine else None
        server = dist.TCPStore(host, port, is_master=False, timeout=STORE_TIMEOUT, wait_for_workers=False)
        self.store = dist.PrefixStore(prefix, server)

    def write(self, what: str, number: int = 0, text: str = "yes") -> None:
        self.store.set(f"{what}/{number}", text or " ")

    def has(self, what: str, number: int = 0) -> bool:
        return self.store.check([f"{what}/{number}"])

    def read(self, what: str, number: int) -> str:
        return self.store.get(f"{what}/{number}").decode("utf-8", errors="replace").strip()

    def meeting(self, number: int) -> dict:
        """Where the child of this number and the target find each other."""
        place = {"host": self.host, "port": self.port, "hostname": self.hostname}
        return {**place, "prefix": f"{self.prefix}/{number}", "secret": ""}


class SupervisedWorker(Connection):
    """
    The target's side. Asks for a child, and is then to be connected.

    Args:
        notes ([`Notes`]): To and from the supervisor.
        number (`int`): Which child, from 0; the first one is started without being asked for.
        timeout (`float`): Seconds until the worker must be ready.
    """

    def __init__(self, notes: Notes, number: int, timeout: float):
        super().__init__()
        self.notes, self.number = notes, number
        self.deadline = time.monotonic() + timeout
        notes.write("asked", number)

    def connect(self) -> None:
        try:
            store = dist.PrefixStore(str(self.number), self.notes.store)
            self._connect(store, self.notes.hostname, self.deadline)
        except BaseException:
            self.kill()
            raise

    @property
    def is_alive(self) -> bool:
        return self.channel is not None and not self._has_ended()

    def last_words(self) -> str:
        return self.notes.read("ended", self.number) if self._wait(SUPERVISOR_TIMEOUT) else ""

    def end(self) -> None:
        self.notes.write("kill", self.number)
        self._wait(SUPERVISOR_TIMEOUT)

    def stop(self) -> None:
        if self.is_alive:
            self._say_stop()
            self._wait(STOP_TIMEOUT)
        self.kill()

    def _wait(self, timeout: float) -> bool:
        """Waits until the worker has ended, at most `timeout` seconds, and tells whether it has."""
        deadline = time.monotonic() + timeout
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(POLL)
        return self._has_ended()

    def _has_ended(self) -> bool:
        return self.notes.has("ended", self.number)


def supervise(notes: Notes, settings: dict, descriptor: int | None) -> None:
    """
    Keeps a worker running, and returns when the target says that it is done, or its store is gone.

    Args:
        notes ([`Notes`]): To and from the target.
        settings (`dict`): What [`~hf_ssd.distributed.worker`] reads, except where it meets the target.
        descriptor (`int`, *optional*): File descriptor of shared weights.
    """

    def start(number: int) -> WorkerProcess:
        descriptors = [] if descriptor is None else [descriptor]
        return WorkerProcess({**settings, "meeting": notes.meeting(number)}, descriptors)

    number, said = 0, False
    process = start(number)
    try:
        while not notes.has("done"):
            if notes.has("asked", number + 1):
                process.end()
                number, said = number + 1, False
                process = start(number)
            elif process.is_running and notes.has("kill", number):
                process.end()
            elif not process.is_running and not said:
                notes.write("ended", number, process.last_words())
                said = True
            time.sleep(POLL)
        process.wait(STOP_TIMEOUT)
    except (dist.DistError, RuntimeError):
        pass  # the store is gone, and with it the target
    finally:
        process.end()
