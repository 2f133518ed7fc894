"""The programs of `examples/`, run as a user would. `tests/conftest.py` lets tests import their modules too."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "examples" / "pair"


def run(*words, status: int = 0, timeout: float = 280, **options) -> str:
    """Runs this Python with some words, and returns what it has printed, or, of an error, what it has said."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **{"cwd": ROOT, **options})
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stderr if status else done.stdout
