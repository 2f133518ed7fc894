"""The draft ranks under torchrun: supervisors, each of whose children does the work.

torchrun ends all ranks when one is killed, so a draft rank does nothing that could kill it. Its child is the draft
worker, which holds the GPU, and may die and be started again alone. Target and supervisor leave each other notes in
torchrun's store: which child is wanted, which one is to be killed, which has ended and what it wrote last.

There is no private pipe between ranks, so target and draft trust torchrun's store, and with it everyone who can reach
MASTER_ADDR:MASTER_PORT or the ports on which gloo and NCCL listen: such a person can take a rank's place, be sent the
prompts and answer with tokens. As torchrun itself, this is for networks and machines whose users trust each other.
"""

import time
from datetime import timedelta

import torch.distributed as dist

from .groups import LOOPBACK
from .process import STOP_TIMEOUT, WorkerProcess

POLL = 0.05  # seconds between two looks at the notes
SUPERVISOR_TIMEOUT = 3.0  # seconds for the supervisor to notice that its child has ended, or is to end
STORE_TIMEOUT = timedelta(seconds=60)


class Notes:
    """
    What target and supervisor of one draft rank write to each other.

    Args:
        host (`str`), port (`int`): Address of torchrun's store.
        prefix (`str`): Prefix of the keys of this run and this draft rank.
        on_one_machine (`bool`): Whether all ranks are on one machine, so that loopback serves them.
    """

    def __init__(self, host: str, port: int, prefix: str, on_one_machine: bool):
        server = dist.TCPStore(host, port, is_master=False, timeout=STORE_TIMEOUT, wait_for_workers=False)
        self.store = dist.PrefixStore(prefix, server)
        hostname = LOOPBACK if on_one_machine else None
        self.place = {"host": host, "port": port, "prefix": prefix, "hostname": hostname, "secret": ""}

    def write(self, what: str, number: int = 0, text: str = "yes") -> None:
        self.store.set(f"{what}/{number}", text or " ")

    def has(self, what: str, number: int = 0) -> bool:
        return self.store.check([f"{what}/{number}"])

    def read(self, what: str, number: int) -> str:
        return self.store.get(f"{what}/{number}").decode("utf-8", errors="replace").strip()

    def meeting(self, number: int) -> dict:
        """Returns where the child of this number and the target find each other."""
        return {**self.place, "prefix": f"{self.place['prefix']}/{number}"}


class SupervisedProcess:
    """
    A supervisor's child as the target sees it, with the methods of [`WorkerProcess`].

    Args:
        notes ([`Notes`]): To and from the supervisor.
        number (`int`): Number of the child, from 0. The first one is started without being asked for.
    """

    def __init__(self, notes: Notes, number: int):
        self.notes, self.number = notes, number
        notes.write("asked", number)

    @property
    def is_running(self) -> bool:
        return not self.notes.has("ended", self.number)

    def wait(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while self.is_running and time.monotonic() < deadline:
            time.sleep(POLL)
        return not self.is_running

    def stderr_tail(self) -> str:
        return self.notes.read("ended", self.number) if self.wait(SUPERVISOR_TIMEOUT) else ""

    def end(self) -> None:
        self.notes.write("kill", self.number)
        self.wait(SUPERVISOR_TIMEOUT)


def supervise(notes: Notes, settings: dict, descriptors: list[int]) -> None:
    """
    Keeps a worker running, and returns when the target says that it is done, or when its store is gone.

    Args:
        notes ([`Notes`]): To and from the target.
        settings (`dict`): What [`~hf_ssd.distributed.worker`] reads, except where it meets the target.
        descriptors (`list[int]`): File descriptors that the worker inherits.
    """

    def start(number: int) -> WorkerProcess:
        return WorkerProcess({**settings, "meeting": notes.meeting(number)}, descriptors)

    number, was_told = 0, False
    process = start(number)
    try:
        while not notes.has("done"):
            if notes.has("asked", number + 1):
                process.end()
                number, was_told = number + 1, False
                process = start(number)
            elif process.is_running and notes.has("kill", number):
                process.end()
            elif not process.is_running and not was_told:
                notes.write("ended", number, process.stderr_tail())
                was_told = True
            time.sleep(POLL)
        process.wait(STOP_TIMEOUT)
    except (dist.DistError, RuntimeError):
        pass  # the store is gone, and with it the target
    finally:
        process.end()
