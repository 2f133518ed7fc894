"""A time budget that is shared out: what comes later gets what is left."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path


class Clock:
    """
    Args:
        seconds (`float`): From now on.
        agree (`Callable`): Makes one answer of several processes' answers, which must not go different ways.
    """

    def __init__(self, seconds: float, agree: Callable[[bool], bool] = bool):
        self.end, self.agree = time.monotonic() + seconds, agree

    @property
    def left(self) -> float:
        return max(0.0, self.end - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.agree(self.left == 0)

    def shares(self, items: list, weights: list[float] | None = None) -> Iterator[tuple[object, "Clock"]]:
        """Goes through items, each of them with a clock of its share of the time that is left by then."""
        weights = weights or [1.0] * len(items)
        for i, item in enumerate(items):
            yield item, Clock(self.left * weights[i] / sum(weights[i:]), self.agree)


def run_for(seconds: float, command: list[str], log: Path, **options) -> int | None:
    """Runs a command that writes to `log`. Returns its exit code, or `None` if the time was up and it was killed."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, **options)
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the workers that it has started
                process.wait()


def first_line(error: BaseException) -> str:
    """Returns what an error says, in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
