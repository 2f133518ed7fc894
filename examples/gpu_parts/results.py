"""The report: report.json, and the same as tables in report.md. Both are written anew whenever something is known."""

import json
import os
from pathlib import Path

PARTS = ("tests", "speed", "profile")
NOT_REACHED, MEASURED = "not reached", "measured"
COLUMNS = {
    "tok/s": ("speed", "{:.1f}"),
    "over plain": ("over plain", "{:.2f}"),
    "+-": ("error", "{:.2f}"),
    "tok/s per device": ("per device", "{:.1f}"),
    "turns": ("turns", "{}"),
    "accepted": ("acceptance", "{:.2f}"),
    "tok/round": ("tokens/round", "{:.2f}"),
    "hits": ("hit rate", "{:.2f}"),
    "lookahead": ("lookahead", "{:.1f}"),
    "verify ms": ("verify ms", "{:.1f}"),
    "wait ms": ("wait ms", "{:.1f}"),
    "predicted tok/s": ("predicted", "{:.1f}"),
    "as plain": ("as plain", "{:.2f}"),
}


class Report:
    """
    Args:
        folder (`Path`): Where to write. A report that is there is gone on with, if it was made with the same.
        about (`dict`, *optional*): What the figures are made with; by default that of the report that is there.

    Attributes:
        data (`dict`): What report.json holds; change it and call [`~Report.save`].
    """

    def __init__(self, folder: Path, about: dict | None = None):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "report.json"
        self.data = json.loads(path.read_text()) if path.exists() else {}
        if about is not None and self.data.get("about") != about:
            self.data = {"about": about}

    def begin(self, part: str, values: dict) -> dict:
        """Returns what is to hold the results of a part, in place of earlier ones."""
        self.data[part] = values
        self.now(part)
        return values

    def now(self, what: str | None) -> None:
        """Notes what is being done, for who reads a report that was cut off, and writes the report."""
        self.data["under way"] = what
        self.save()

    def save(self) -> None:
        _write(self.folder / "report.json", json.dumps(self.data, indent=1) + "\n")
        _write(self.folder / "report.md", markdown(self.data))

    def draw_timeline(self, stats, what: str) -> None:
        """Draws the rounds of a call, in place of an earlier picture."""
        try:
            stats.plot_timeline(self.folder / "timeline.png")
            self.data["timeline"] = what
        except (ImportError, ValueError) as error:  # no matplotlib, or no rounds
            self.data["timeline"] = f"not drawn: {error}"
        self.save()


def _write(path: Path, text: str) -> None:
    """A reader, or whoever ends this process, never meets half a file."""
    half = path.with_name(f"{path.name}.{os.getpid()}")
    half.write_text(text)
    os.replace(half, path)


def markdown(data: dict) -> str:
    """Returns report.md."""
    about = data.get("about", {})
    lines = ["# GPU report", ""]
    if about.get("dry run"):
        lines += ["**A dry run on a CPU with tiny models: its figures say nothing about speed.**", ""]
    if data.get("under way"):
        lines += [f"Cut off, or still running: {data['under way']}.", ""]
    lines += [f"- {name}: {', '.join(value) if isinstance(value, list) else value}" for name, value in about.items()]
    for part, chapter in (("tests", _tests), ("speed", _speed), ("profile", _profile)):
        if part in data:
            lines += ["", f"## {part.capitalize()}", "", *chapter(data[part])]
            if data[part].get("failed"):
                lines += ["", f"This part ended early: {data[part]['failed']}"]
    if "timeline" in data:
        lines += ["", "## Timeline", "", f"timeline.png: {data['timeline']}"]
    return "\n".join(lines) + "\n"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _tests(tests: dict) -> list[str]:
    counts = ", ".join(f"{count} {outcome}" for outcome, count in tests.get("counts", {}).items())
    lines = [
        f"`{tests['command']}`: {tests.get('result', NOT_REACHED)} ({counts or 'no test ended'}). Output: tests.txt"
    ]
    bad = [[name, outcome] for name, outcome in tests.get("outcomes", {}).items() if outcome in ("FAILED", "ERROR")]
    return lines + (["", *table(["test", "outcome"], bad)] if bad else [])


def _speed(speed: dict) -> list[str]:
    lines = [
        "Ratios are medians over turns of a method's speed over that of plain `generate()` in the same turn, with the "
        "standard error of their mean; tok/s are medians while decoding, all rows together."
    ]
    settings = list(dict.fromkeys(cell["setting"] for cell in speed["cells"]))
    for setting in settings:
        cells = [cell for cell in speed["cells"] if cell["setting"] == setting]
        rows = [[name, *(_text(cell.get(key), form) for key, form in COLUMNS.values())] for name, cell in _best(cells)]
        missing = [f"{cell['method']} ({cell['result']})" for cell in cells if cell["result"] != MEASURED]
        lines += ["", f"### {setting}", ""]
        lines += table(["method", *COLUMNS], rows) if rows else []
        lines += ["", f"Not measured: {'; '.join(missing)}."] if missing else []
    return lines


def _text(value, form: str) -> str:
    return "" if value is None else form.format(value)


def _best(cells: list[dict]) -> list[tuple[str, dict]]:
    """Of methods that were tried with several settings, the best; and all others. With their names."""
    best = {}
    for cell in cells:
        if cell["result"] != MEASURED:
            continue
        family = cell["family"]
        if family not in best or cell["speed"] > best[family]["speed"]:
            best[family] = cell
    tried = {family: sum(c["family"] == family and c["result"] == MEASURED for c in cells) for family in best}
    return [(f"{c['method']} (best of {tried[f]})" if tried[f] > 1 else c["method"], c) for f, c in best.items()]


def _profile(profile: dict) -> list[str]:
    lines = []
    for pair, figures in profile["pairs"].items():
        lines += [f"### {pair}", ""]
        for title, values in figures.items():
            if isinstance(values, str):
                lines += [f"{title}: {values}", ""]
                continue
            rows = [
                [name, f"{value:.2f}" if isinstance(value, float) else str(value)] for name, value in values.items()
            ]
            lines += [*table([title, ""], rows), ""]
    return lines
