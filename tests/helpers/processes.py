"""The processes that this one has started."""

import subprocess
import time

import psutil

from hf_ssd.distributed import launch, worker_process


def children() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


def ends_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


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
