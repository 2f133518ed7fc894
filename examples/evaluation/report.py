"""What the runs say: a Markdown table and a figure."""

import os
from pathlib import Path

from hf_ssd import SSDStats
from hf_ssd.rounds import RoundRecord

LABELS = {"plain": "AR", "assisted": "assisted", "sd": "SD", "ssd": "SSD"}
COLORS = {"plain": "#8fa6bf", "assisted": "#b9c4a4", "sd": "#c9b3d0", "ssd": "#dd8b3c"}
METRICS = Path(__file__).parent.parent / "metrics"
ALL = "all"


def speed(runs: list[dict]) -> float | None:
    """Tokens per second while decoding: the prefill and the tokens that it gives do not count."""
    tokens = sum(run["tokens"] - run["rows"] for run in runs)
    return tokens / sum(run["seconds"] - run["prefill"] for run in runs) if tokens else None


def rounds_of(runs: list[dict]) -> SSDStats:
    """Returns the rounds of all runs as those of one call, for the rates."""
    records = []
    for run in runs:
        columns = (run["rounds"][name] for name in ("lookahead", "accepted", "sources"))
        records += [RoundRecord(lookahead=k, accepted=counts, sources=sources) for k, counts, sources in zip(*columns)]
    return SSDStats(records=records)


def identical(runs: list[dict], plain: list[dict]) -> tuple[int, int]:
    """Returns how many answers are those of plain generate(), token by token, and how many there are."""
    expected = {(run["dataset"], run["batch"]): run["token_ids"] for run in plain}
    pairs = [(run["token_ids"], expected[run["dataset"], run["batch"]]) for run in runs]
    return sum(row == other for rows, others in pairs for row, other in zip(rows, others)), sum(
        len(rows) for rows, _ in pairs
    )


def quality(runs: list[dict], references: list, metric: str, execute_code: bool) -> float:
    """
    Returns what a metric of `examples/metrics` says of the answers to one dataset.

    Args:
        runs (`list[dict]`): Of one method, in any order.
        references (`list`): In the order of the prompts.
        metric (`str`): Its folder.
        execute_code (`bool`): Whether programs may be run.
    """
    import evaluate

    answers = [text for run in sorted(runs, key=lambda run: run["batch"]) for text in run["text"]]
    options = {"execute_code": execute_code, "num_workers": os.cpu_count()} if metric == "pass_at_1" else {}
    module = evaluate.load(str(METRICS / metric), keep_in_memory=True)
    return next(iter(module.compute(predictions=answers, references=references, **options).values()))


def rows_of(runs: list[dict], datasets: list[str], methods: list[str]) -> list[dict]:
    """Returns the figures of each dataset, and of all together if there are several."""
    groups = {name: [run for run in runs if run["dataset"] == name] for name in datasets}
    if len(groups) > 1:
        groups[ALL] = runs
    rows = []
    for name, group in groups.items():
        of = {method: [run for run in group if run["method"] == method] for method in methods}
        row = {"dataset": name, "prompts": sum(run["rows"] for run in of[methods[0]])}
        row["speed"] = {method: speed(of[method]) for method in methods}
        if "ssd" in methods:
            rounds = rounds_of(of["ssd"])
            row |= {"hit rate": rounds.hit_rate, "acceptance": rounds.acceptance_rate}
        if "plain" in methods:
            row["identical"] = {m: identical(of[m], of["plain"]) for m in methods if m != "plain"}
        rows.append(row)
    return rows


def markdown(rows: list[dict], methods: list[str], sampled: bool, qualities: dict[str, tuple[str, dict]]) -> str:
    """
    Args:
        rows (`list[dict]`): See [`rows_of`].
        methods (`list[str]`): Those that were run.
        sampled (`bool`): Whether answers are drawn, and so need not be identical.
        qualities (`dict`): For each dataset that has a metric, its name and the value of each method.

    Returns:
        `str`: A table of speeds, and one of task quality if there is something to say.
    """
    ratios = [(over, base) for over, base in (("ssd", "sd"), ("ssd", "plain")) if {over, base} <= set(methods)]
    header = ["dataset", "prompts", *(f"{LABELS[m]} tokens/s" for m in methods)]
    header += [f"{LABELS[over]}/{LABELS[base]}" for over, base in ratios]
    header += ["hit rate", "acceptance"] if "ssd" in methods else []
    compared = "plain" in methods and not sampled and len(methods) > 1
    header += ["identical to AR"] if compared else []
    lines = []
    for row in rows:
        speeds = row["speed"]
        line = [row["dataset"], str(row["prompts"]), *(_number(speeds[m], ".1f") for m in methods)]
        for over, base in ratios:
            line.append(_number(speeds[over] / speeds[base] if speeds[over] and speeds[base] else None, ".2f"))
        line += [_number(row[name], ".2f") for name in ("hit rate", "acceptance") if name in row]
        if compared:
            line.append(", ".join(f"{LABELS[m]} {same}/{count}" for m, (same, count) in row["identical"].items()))
        lines.append(line)
    text = _table(header, lines)
    if qualities:
        lines = [[name, metric, *(_number(of[m], ".3f") for m in methods)] for name, (metric, of) in qualities.items()]
        text += "\n" + _table(["dataset", "task quality", *(LABELS[m] for m in methods)], lines)
    return text


def draw(rows: list[dict], methods: list[str], path: Path) -> None:
    """Draws the speeds, a group of bars for each dataset. Without matplotlib it says so, and draws nothing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print('No figure was drawn: that needs matplotlib, pip install -e ".[eval]".')
        return
    figure = Figure(figsize=(2.5 + 1.6 * len(rows), 3.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(methods)
    for i, method in enumerate(methods):
        places = [group + (i - (len(methods) - 1) / 2) * width for group in range(len(rows))]
        heights = [row["speed"][method] or 0 for row in rows]
        bars = axes.bar(places, heights, width, label=LABELS[method], color=COLORS[method])
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
    axes.set_xticks(range(len(rows)), [row["dataset"] for row in rows])
    axes.set_ylabel("tokens/s while decoding")
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(ncols=len(methods), loc="outside upper center", frameon=False)
    figure.savefig(path, dpi=150)


def _table(header: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, rule, *lines])


def _number(value: float | None, template: str) -> str:
    return "-" if value is None else format(value, template)
