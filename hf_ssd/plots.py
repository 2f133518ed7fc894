"""Plots the timeline and the acceptance of a call."""

from . import timeline

COLORS = {"prefill": "#8c6bb1", "verify": "#2b6cb0", "wait": "#e2e8f0", "prepare": "#dd8b3c", "answer": "#b83232"}
ROUNDS_SHOWN = 12


def plot_timeline(stats, path, rounds: range | None = None) -> None:
    from matplotlib.figure import Figure  # imported here because only plots need it
    from matplotlib.patches import Patch

    if rounds is None:
        first = max(0, stats.rounds // 2 - ROUNDS_SHOWN // 2)
        rounds = range(first, min(first + ROUNDS_SHOWN, stats.rounds))
    shown = [one for one in timeline.intervals(stats) if one.round in rounds and one.what != "prefill"]
    if not shown:
        raise ValueError(f"The call had {stats.rounds} rounds, none of them in {rounds}.")
    begin = min(interval.start for interval in shown)
    figure = Figure(figsize=(11, 2.6), layout="constrained")
    axes = figure.subplots()
    for interval in shown:
        place, width = 1e3 * (interval.start - begin), 1e3 * (interval.end - interval.start)
        axes.barh(interval.side, width, left=place, height=0.6, color=COLORS[interval.what], linewidth=0)
        if interval.what == "verify":
            text = timeline.label(stats.records[interval.round])
            axes.text(place + width / 2, 0.36, text, ha="center", va="top", fontsize=7)
    axes.set_ylim(1.6, -0.8)  # the target on top, with room for the labels
    axes.set_yticks([0, 1], [timeline.TARGET, timeline.DRAFT])
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


def plot_acceptance(stats, path) -> None:
    """Draws the acceptance rate at each place, over the tested tokens, and the share of each accepted count."""
    from matplotlib.figure import Figure

    rounds = [(k, accepted) for k, accepted, _ in stats.verified_rows() if k]
    if not rounds:
        raise ValueError("Nothing was drafted in this call, so there is no acceptance to draw.")
    longest = max(k for k, _ in rounds)
    tested = [sum(place < k and place <= accepted for k, accepted in rounds) for place in range(longest)]
    good = [sum(place < k and place < accepted for k, accepted in rounds) for place in range(longest)]
    counts = [sum(accepted == count for _, accepted in rounds) / len(rounds) for count in range(longest + 1)]
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    by_place, by_count = figure.subplots(1, 2)
    by_place.bar(range(1, longest + 1), [g / t if t else 0.0 for g, t in zip(good, tested)], color=COLORS["prepare"])
    by_place.axhline(stats.acceptance_rate, color=COLORS["answer"], linewidth=1)
    by_place.set(xlabel="place in the speculation", ylabel="acceptance rate", ylim=(0, 1.05))
    by_count.bar(range(longest + 1), counts, color=COLORS["verify"])
    by_count.set(xlabel="accepted tokens", ylabel="share of speculations")
    for axes, first in ((by_place, 1), (by_count, 0)):
        axes.set_xticks(range(first, longest + 1, max(1, longest // 8)))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
