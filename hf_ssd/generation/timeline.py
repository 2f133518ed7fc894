"""What target and draft did when, from the figures of a call, and the same for a trace viewer."""

from dataclasses import dataclass

TARGET, DRAFT = "target", "draft"


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
