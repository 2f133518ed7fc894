"""The timeline of target and draft in a call, as intervals and as a file for a trace viewer."""

from dataclasses import dataclass

from .rounds import EARLY_TITLE, RoundRecord

TARGET, DRAFT = "target", "draft"


@dataclass(frozen=True)
class Interval:
    """A stretch of time that a side spent on a single task, in seconds since the beginning of the call."""

    side: str  # "target" or "draft"
    what: str  # "prefill", "verify", "wait", "prepare" or "answer"
    start: float
    end: float
    round: int
    details: dict  # figures of the round that a trace viewer shows


def intervals(stats) -> list[Interval]:
    """Returns the intervals of both sides in a call ([`SSDStats`]), in the order of the rounds."""
    result = [Interval(TARGET, "prefill", 0.0, stats.prefill_seconds, 0, {})]
    for i, record in enumerate(stats.records):
        received, rows = record.received_at, record.live
        about = {
            "lookahead": record.lookahead,
            "rows": len(rows),
            "rows that hit": sum(record.hits[row] for row in rows),
            f"rows with {EARLY_TITLE}": sum(map(record.is_early, rows)),
        }
        result.append(Interval(TARGET, "wait", received - record.wait_seconds, received, i, about))
        details = {**about, "accepted": record.accepted}
        if record.nodes:
            details |= {"nodes": record.nodes, "rows that took a sibling": sum(map(record.took_sibling, rows))}
        result.append(Interval(TARGET, "verify", received, received + record.verify_seconds, i, details))
        preparing = record.choose_seconds + record.grow_seconds
        if record.prepared_at >= 0 and preparing > 0:
            details = {"budget": record.budget}
            result.append(Interval(DRAFT, "prepare", record.prepared_at, record.prepared_at + preparing, i, details))
        if record.answered_at >= 0:
            end = record.answered_at + record.answer_seconds
            result.append(Interval(DRAFT, "answer", record.answered_at, end, i, about))
    return result


def label(record: RoundRecord) -> str:
    """Returns "hit", "miss", `EARLY_TITLE` if all rows had early tokens, or how many of the other rows hit."""
    asked = [record.hits[row] for row in record.live if not record.is_early(row)]
    if record.live and not asked:
        return EARLY_TITLE
    return "hit" if record.is_hit else f"{sum(asked)} of {len(asked)}" if any(asked) else "miss"


def perfetto(stats) -> dict:
    """Returns a trace in Chrome's JSON format for ui.perfetto.dev and chrome://tracing, with times in microseconds."""
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
