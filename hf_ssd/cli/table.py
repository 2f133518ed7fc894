"""The results of a benchmark: as figures, as a table and as a picture."""

import statistics
from pathlib import Path

import torch

from .. import theory
from .methods import ASSISTED, PLAIN, SD, SSD, Method, Run


def rows_of(methods: dict[str, Method]) -> list[dict]:
    """Returns a row for each method. Of a method's several settings, the best and transformers' default have rows."""
    rows = [row_of(name, method, methods[PLAIN].runs) for name, method in methods.items()]
    of_families = [[row for row in rows if row["method"].startswith(f"{family}, ")] for family in (ASSISTED, SD)]
    assisted, sd = (max(tried, key=lambda row: row["over plain"], default=None) for tried in of_families)
    for row in rows:
        row["best"] = row in (assisted, sd)
        if row["method"] == SSD and sd:
            bound = theory.ssd_over_speculative_decoding_bound(sd["T_SD"], row["tokens/round"], sd["tokens/round"])
            row |= {"T_SD": sd["T_SD"], "over in turn": row["over plain"] / sd["over plain"], "Corollary 9": bound}
    return [row for row in rows if row["best"] or row["method"] in (PLAIN, f"{ASSISTED}, default", SSD)]


def row_of(name: str, method: Method, plain: list[Run]) -> dict:
    """Returns the row of a method, compared with plain generate() turn by turn."""
    speeds = [run.speed for run in method.runs]
    return {
        "method": name,
        "speed": statistics.median(speeds),
        "low": min(speeds),
        "high": max(speeds),
        "over plain": statistics.median(speed / base.speed for speed, base in zip(speeds, plain)),
        "per device": statistics.median(speeds) / method.devices,
        "prefill ms": 1e3 * statistics.median(run.prefill for run in method.runs),
        "same tokens": all(torch.equal(run.sequences, base.sequences) for run, base in zip(method.runs, plain)),
        **figures_of(method.runs),
    }


def figures_of(runs: list[Run]) -> dict:
    """Returns the parts of a round, as medians over the runs."""
    parts = [parts_of(run) for run in runs if run.stats is not None]
    values = {key: [part[key] for part in parts if part[key] is not None] for key in (parts or [{}])[0]}
    return {key: statistics.median(found) if found else None for key, found in values.items()}


def parts_of(run: Run) -> dict:
    """Returns the parts of a round, as means over the rounds of a call."""
    stats, predicted = run.stats, theory.predict(run.stats)
    columns = "verify_seconds wait_seconds answer_seconds draft_seconds lookahead budget".split()
    verify, wait, answer, draft, lookahead, budget = (sum(stats.column(name)) / stats.rounds for name in columns)
    hits = [record for record in stats.records if record.is_hit]
    verified = sum(record.verify_seconds for record in hits)
    return {
        "acceptance": stats.acceptance_rate,
        "tokens/round": stats.tokens_per_round,
        "hit rate": stats.hit_rate,
        "lookahead": lookahead,
        "budget": budget,
        "verify ms": 1e3 * verify,
        "wait ms": 1e3 * wait,
        "answer ms": 1e3 * answer,
        "prepare ms": 1e3 * (draft - answer),
        "wait on hits / verify": sum(record.wait_seconds for record in hits) / verified if verified else None,
        "T_p": (draft - answer) / verify,
        "T_SD": None if budget else wait / verify,
        "predicted": predicted,
        "measured / predicted": run.speed / predicted,
    }


COLUMNS = {
    "tokens/s": ("speed", "{:.1f}"),
    "spread": (("low", "high"), "{:.0f}-{:.0f}"),
    "over plain": ("over plain", "{:.2f}x"),
    "per device": ("per device", "{:.1f}"),
    "prefill": ("prefill ms", "{:.0f}"),
    "accept": ("acceptance", "{:.2f}"),
    "tok/round": ("tokens/round", "{:.2f}"),
    "hits": ("hit rate", "{:.2f}"),
    "verify": ("verify ms", "{:.1f}"),
    "wait": ("wait ms", "{:.1f}"),
    "prepare": ("prepare ms", "{:.1f}"),
    "answer": ("answer ms", "{:.1f}"),
    "T_SD": ("T_SD", "{:.2f}"),
    "T_p": ("T_p", "{:.2f}"),
    "predicted": ("predicted", "{:.1f}"),
    "of it": ("measured / predicted", "{:.2f}"),
}


def table(rows: list[dict], sampled: bool) -> str:
    """Returns the rows as text, with times in ms."""
    cells = [["", *COLUMNS, "" if sampled else "same tokens"]]
    for row in rows:
        line = [row["method"] + (" (best)" if row["best"] else "")]
        for keys, template in COLUMNS.values():
            values = [row.get(key) for key in ([keys] if isinstance(keys, str) else keys)]
            line.append("" if None in values else template.format(*values))
        cells.append([*line, "" if sampled else "yes" if row["same tokens"] else "NO"])
    widths = [max(map(len, column)) for column in zip(*cells)]
    padded = [[name.ljust(widths[0]), *map(str.rjust, values, widths[1:])] for name, *values in cells]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def summary(rows: list[dict]) -> str:
    """Returns lines that compare SSD with the other methods."""
    ssd = next(row for row in rows if row["method"] == SSD)
    lines = [f"SSD over plain generate: {ssd['over plain']:.2f}"]
    if assisted := [row["over plain"] for row in rows if row["method"].startswith(ASSISTED)]:
        best = max(assisted)
        lines.append(f"SSD over assisted generation at its best: {ssd['over plain'] / best:.2f}")
    if ssd.get("Corollary 9"):
        over, bound = ssd["over in turn"], ssd["Corollary 9"]
        lines.append(f"SSD over speculative decoding in turn: {over:.2f}; at most {bound:.2f} by Corollary 9")
    if ssd.get("wait on hits / verify") is not None:
        lines.append(f"Wait on hits over verification: {ssd['wait on hits / verify']:.3f}")
    return "\n".join(lines)


def draw(tables: dict[str, list[dict]], path: Path) -> None:
    """Draws the speeds relative to plain generate(), with a panel for each table."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(tables), 3.2), layout="constrained")
    panels = figure.subplots(1, len(tables), squeeze=False, sharex=True)[0]
    for axes, (title, rows) in zip(panels, tables.items()):
        speeds = {row["method"]: row["over plain"] for row in rows}
        bars = axes.barh(*zip(*speeds.items()), color=["#dd8b3c" if name == SSD else "#8fa6bf" for name in speeds])
        axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * max(row["over plain"] for rows in tables.values() for row in rows))
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("speed over plain generate")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
