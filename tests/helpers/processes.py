"""The processes that this one has started, and waits for what is soon so."""

import subprocess
import time
from collections.abc import Callable

import psutil

from hf_ssd.distributed import launch, worker_process


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Waits until a condition holds, and says whether it did in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def children() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ends_within(pid: int, seconds: float) -> bool:
    return within(seconds, lambda: has_ended(pid))


def noted_workers(monkeypatch) -> list[subprocess.Popen]:
    """Returns a list to which the processes of workers are added as they start."""
    processes = []

    class Noted(worker_process.Child):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            processes.append(self.popen)

    monkeypatch.setattr(launch, "Child", Noted)
    return processes


def workers_are(monkeypatch, command: list[str]) -> None:
    """Starts another program in the place of each worker."""
    popen = subprocess.Popen
    monkeypatch.setattr(worker_process.subprocess, "Popen", lambda _, **options: popen(command, **options))
