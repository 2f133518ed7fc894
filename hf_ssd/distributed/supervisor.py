"""The draft ranks under torchrun: supervisors, whose children do the work.

torchrun ends all ranks when any rank is killed, so a draft rank does nothing that could kill it. Its child is the draft
worker, which holds the GPU, and may die and be restarted alone. Target and supervisor leave each other notes in
torchrun's store: which child is `asked` for, which child to `kill`, which child has `ended` and the end of its standard
error, and whether the target is `done`.

There is no private pipe between ranks, so target and draft trust torchrun's store, and everyone who can reach it.
"""

import itertools
import time

import torch.distributed as dist

from .launch import start_worker
from .meeting import join
from .weights import SharedWeights
from .worker_process import STOP_TIMEOUT, WorkerProcess

POLL = 0.05  # seconds between two checks of the notes
SUPERVISOR_TIMEOUT = 3.0  # seconds for the supervisor to notice that its child has ended, or is to end
STORE_TIMEOUT = 60.0  # seconds


def worker_of(place: dict, timeout: float) -> WorkerProcess:
    """Returns the worker of a draft rank: a child that is asked for by a note in `place`."""
    notes, numbers = join(place, STORE_TIMEOUT), itertools.count()

    def launch() -> tuple[SupervisedChild, dict]:
        number = next(numbers)
        return SupervisedChild(notes, number), meeting_of(place, number)

    return WorkerProcess(launch, timeout)


def meeting_of(place: dict, number: int) -> dict:
    """Returns where the child of this number meets the target. `place` is the place of the notes of its rank."""
    return {**place, "prefix": f"{place['prefix']}/{number}"}


class SupervisedChild:
    """A supervisor's child as the target sees it, with the methods of [`Child`]. The first one, 0, starts unasked."""

    def __init__(self, notes: dist.Store, number: int):
        self.notes, self.number = notes, number
        notes.set(f"asked/{number}", "yes")

    @property
    def is_running(self) -> bool:
        return not self.notes.check([f"ended/{self.number}"])

    def wait(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while self.is_running and time.monotonic() < deadline:
            time.sleep(POLL)
        return not self.is_running

    def stderr_tail(self) -> str:
        if not self.wait(SUPERVISOR_TIMEOUT):
            return ""
        return self.notes.get(f"ended/{self.number}").decode("utf-8", errors="replace").strip()

    def end(self) -> None:
        self.notes.set(f"kill/{self.number}", "yes")
        self.wait(SUPERVISOR_TIMEOUT)


def supervise(place: dict, settings: dict, weights: SharedWeights | None) -> None:
    """Starts a worker, and another one whenever the target asks for it, until the target or the store is gone."""
    notes = join(place, STORE_TIMEOUT)
    number = 0
    was_told = False
    process, _ = start_worker(settings, weights, meeting_of(place, number))
    try:
        while not notes.check(["done"]):
            if notes.check([f"asked/{number + 1}"]):
                process.end()
                number, was_told = number + 1, False
                process, _ = start_worker(settings, weights, meeting_of(place, number))
            elif process.is_running and notes.check([f"kill/{number}"]):
                process.end()
            elif not process.is_running and not was_told:
                notes.set(f"ended/{number}", process.stderr_tail() or " ")
                was_told = True
            time.sleep(POLL)
        process.wait(STOP_TIMEOUT)
    except (dist.DistError, RuntimeError):
        pass  # the store is gone, and with it the target
    finally:
        process.end()
        if weights is not None:
            weights.close()
