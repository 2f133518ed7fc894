"""results.jsonl, to which every run is added, and from which an evaluation goes on where it stopped."""

import json
import os
from pathlib import Path


class ResultsFile:
    """
    The first line holds the arguments; each other line is one run: a batch of a dataset, answered by a method.

    Args:
        path (`Path`): Read if it is there. A last line that was not written to its end is dropped.
        arguments (`dict`): What the runs depend on.
        about (`dict`): What else is to be noted when the file begins.

    Raises:
        `ValueError`: the file was begun with other arguments.
    """

    def __init__(self, path: Path, arguments: dict, about: dict):
        self.path, self.header = path, {"arguments": arguments, **about}
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            begun_with = lines[0]["arguments"] if lines else None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a file of results; choose another --output.") from error
        if lines and begun_with != arguments:
            names = sorted(n for n in {**begun_with, **arguments} if begun_with.get(n) != arguments.get(n))
            others = ", ".join(f"{n} was {begun_with.get(n)} and is {arguments.get(n)}" for n in names)
            message = f"{path} was begun with other arguments ({others})"
            raise ValueError(f"{message}; choose another --output, or repeat them.")
        self.runs: list[dict] = lines[1:]
        self._is_begun = bool(lines)
        if len(whole) < len(content):
            os.truncate(path, len(whole))

    def has(self, dataset: str, batch: int, method: str) -> bool:
        return any((r["dataset"], r["batch"], r["method"]) == (dataset, batch, method) for r in self.runs)

    def add(self, run: dict) -> None:
        """Writes a run, so that it outlives this process."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            for line in [run] if self._is_begun else [self.header, run]:
                file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._is_begun = True
        self.runs.append(run)
