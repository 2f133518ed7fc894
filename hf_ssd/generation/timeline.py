"""What target and draft did when, from the figures of a call: for a trace viewer, or as a picture."""

from dataclasses import dataclass

TARGET, DRAFT = "target", "draft"
COLORS = {"prefill": "#8c6bb1", "verify": "#2b6cb0", "wait": "#e2e8f0", "prepare": "#dd8b3c", "answer": "#b83232"}
ROUNDS_SHOWN = 12


@dataclass(frozen=True)
class Interval:
    """
    Args:
        side (`str`): `"target"` or `"draft"`.
        what (`str`): `"prefill"`, `"verify"`, `"wait"`, `"prepare"` or `"answer"`.
        start, end (`float`): Seconds since the beginning of the call.
        round (`int`): Number of the round.
        details (`dict`): What is to be known about it.
    """

    side: str
    what: str
    start: float
    end: float
    round: int
    details: dict


def intervals(stats) -> list[Interval]:
    """
    Args:
        stats ([`SSDStats`]): How the rounds of a call went.

    Returns:
        `list[Interval]`: What each side did in each round, in the order of the rounds.
    """
    result = [Interval(TARGET, "prefill", 0.0, stats.prefill_seconds, 0, {})]
    for i, received in enumerate(stats.received_at):
        hits, live = stats.hits[i], [k >= 0 for k in stats.accepted[i]] if i < len(stats.accepted) else []
        hit_rows = sum(hit and alive for hit, alive in zip(hits, live))
        about = {"lookahead": stats.lookahead[i], "rows": sum(live), "rows that hit": hit_rows}
        result.append(Interval(TARGET, "wait", received - stats.wait_seconds[i], received, i, about))
        if i < len(stats.verify_seconds):
            details = {**about, "accepted": stats.accepted[i]}
            result.append(Interval(TARGET, "verify", received, received + stats.verify_seconds[i], i, details))
        prepared, answered = stats.prepared_at[i], stats.answered_at[i]
        preparing = stats.draft_seconds[i] - stats.answer_seconds[i]
        if prepared >= 0 and preparing > 0:
            details = {"budget": stats.budget[i]}
            result.append(Interval(DRAFT, "prepare", prepared, prepared + preparing, i, details))
        if answered >= 0:
            result.append(Interval(DRAFT, "answer", answered, answered + stats.answer_seconds[i], i, about))
    return result


def perfetto(stats) -> dict:
    """Returns a trace in the Chrome JSON format, which ui.perfetto.dev and chrome://tracing open; times in us."""
    sides = {TARGET: 1, DRAFT: 2}
    names = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": side}} for side, pid in sides.items()
    ]
    events = [
        {
            "ph": "X",
            "name": interval.what,
            "cat": interval.side,
            "pid": sides[interval.side],
            "tid": 0,
            "ts": 1e6 * interval.start,
            "dur": 1e6 * (interval.end - interval.start),
            "args": {"round": interval.round, **interval.details},
        }
        for interval in intervals(stats)
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def plot(stats, path, rounds: range | None = None) -> None:
    """
    Draws the two sides below each other, like Figure 1 of the paper.

    Args:
        stats ([`SSDStats`]): How the rounds of a call went.
        path (`str` or `os.PathLike`): Where to write the picture; the ending says the format.
        rounds (`range`, *optional*): Which rounds. Defaults to twelve in the middle.

    Raises:
        `ImportError`: matplotlib is not installed.
        `ValueError`: the call had no such rounds.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    if rounds is None:
        first = max(0, stats.rounds // 2 - ROUNDS_SHOWN // 2)
        rounds = range(first, min(first + ROUNDS_SHOWN, stats.rounds))
    shown = [interval for interval in intervals(stats) if interval.round in rounds and interval.what != "prefill"]
    if not shown:
        raise ValueError(f"The call had {stats.rounds} rounds, none of them in {rounds}.")
    begin = min(interval.start for interval in shown)
    figure = Figure(figsize=(11, 2.6), layout="constrained")
    axes = figure.subplots()
    for interval in shown:
        place, width = 1e3 * (interval.start - begin), 1e3 * (interval.end - interval.start)
        axes.barh(interval.side, width, left=place, height=0.6, color=COLORS[interval.what], linewidth=0)
        if interval.what == "verify":
            hits, rows = interval.details["rows that hit"], interval.details["rows"]
            text = "hit" if rows and hits == rows else "miss" if not hits else f"{hits} of {rows}"
            axes.text(place + width / 2, 0.36, text, ha="center", va="top", fontsize=7)
    axes.set_ylim(1.6, -0.8)  # the target on top, with room for the words
    axes.set_yticks([0, 1], [TARGET, DRAFT])
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right"]].set_visible(False)
    kinds = [what for what in COLORS if any(interval.what == what for interval in shown)]
    axes.legend(
        handles=[Patch(color=COLORS[what], label=what) for what in kinds],
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=len(kinds),
        frameon=False,
    )
    figure.savefig(path, dpi=150)
