"""How fast is it, really? Plain generate(), assisted generation, speculative decoding and SSD, side by side.

    python examples/benchmark.py
    python examples/benchmark.py --layered 287m/39m --agreement 0.85 --dtype bfloat16 --lookahead 8 --budget 12
    python examples/benchmark.py --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --prompts prompts.jsonl --batch-size 4

The target has the same device in every row, and SSD one more for its draft, as in the paper. A second table gives the
others, on a CPU, all cores that SSD has. Methods take turns, again and again, so that what else the machine does falls
on all of them alike; each is compared with plain generate() within one turn, and the median counts.
"""

import argparse
import importlib.util
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from evaluation.prompts import check_file
from tqdm.auto import tqdm
from transformers import StoppingCriteria, StoppingCriteriaList, set_seed
from transformers.utils import logging
from workload import about, add_pair_and_work, batches_for, cores_for, load_pair, sampling, synchronize

import hf_ssd
from hf_ssd import theory, timeline
from hf_ssd.distributed.cores import CoreShare, use_cores

PLAIN, ASSISTED, SD, SSD = "plain generate", "assisted", "SSD, in turn", "SSD"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_pair_and_work(parser)
    method = parser.add_argument_group("methods")
    method.add_argument("--lookahead", type=int, help="of SSD; default: planned")
    method.add_argument("--budget", type=int, help="of SSD; default: planned")
    method.add_argument("--in-turn-lookaheads", type=int, nargs="*", default=[2, 3, 4, 6, 8])
    method.add_argument(
        "--assistant-tokens", type=int, nargs="*", default=[2, 3, 4, 6, 8], help="of assisted generation"
    )
    method.add_argument("--one-table", action="store_true", help="do not give the others all cores in a second table")
    method.add_argument("--repeats", type=int, default=5, help="turns; one more warms up")
    method.add_argument("--pin", nargs=2, metavar=("TARGET", "DRAFT"), help="cores of each side, as in 0,1,2 3")
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, help="folder for benchmark.json and benchmark.png")
    output.add_argument(
        "--trace", type=Path, help="a timeline of the last SSD run, for Perfetto; and a picture beside it"
    )
    args = parser.parse_args(arguments)
    if (args.output or args.trace) and importlib.util.find_spec("matplotlib") is None:
        parser.error('pictures need matplotlib: pip install -e ".[plot]"')
    try:
        if args.prompts:
            check_file(args.prompts)
    except ValueError as error:
        parser.error(str(error))
    return args


# ---------------------------------------------------------------- what is measured


class FirstToken(StoppingCriteria):
    """Notes when the first token is there."""

    def __init__(self):
        self.at: float | None = None

    def __call__(self, input_ids, scores, **kwargs):
        if self.at is None:
            input_ids[0, -1].item()  # a GPU may not have come that far
            self.at = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@dataclass
class Method:
    """
    Args:
        options (`dict`): For generate().
        cores (`tuple[int, ...]`, *optional*): Of this process, if the target is on the CPU.
        devices (`int`): How many it uses, counting cores on the CPU.
        settings (`dict`): Attributes of the draft's generation config, for transformers' own assistant.
        runs (`list[Run]`): What was measured.
    """

    options: dict
    cores: tuple[int, ...] | None
    devices: int
    settings: dict = field(default_factory=dict)
    runs: list["Run"] = field(default_factory=list)


@dataclass
class Run:
    """
    Args:
        tokens (`int`): New tokens of all rows.
        rows (`int`): Batch size: the prefill gives that many tokens.
        prefill, seconds (`float`): Until the first tokens, and in all.
        stats ([`~hf_ssd.SSDStats`], *optional*): Of a method of ours.
        sequences (`torch.LongTensor`): The output.
    """

    tokens: int
    rows: int
    prefill: float
    seconds: float
    stats: object
    sequences: torch.LongTensor

    @property
    def speed(self) -> float:
        """Tokens per second while decoding."""
        return (self.tokens - self.rows) / (self.seconds - self.prefill)


class Bench:
    """Runs methods of generation with a target, a draft, the draft's worker, and batches used one after the other."""

    def __init__(self, args, target, draft, assistant, batches: list[dict]):
        self.args, self.target, self.draft, self.assistant, self.batches = args, target, draft, assistant, batches
        self.options = {"max_new_tokens": args.new_tokens, "return_dict_in_generate": True}
        self.options |= sampling(args.temperature)
        if args.ignore_eos:
            self.options["min_new_tokens"] = args.new_tokens

    def methods(self, cores: CoreShare | None, all_devices: bool) -> dict[str, Method]:
        """Returns what is to be compared; with `all_devices` the others have all cores that SSD has."""
        target_cores = cores and cores.target
        both = cores and tuple(sorted({*cores.target, *sum(cores.drafts, ())}))
        theirs = both if all_devices else target_cores
        devices = len(theirs) if theirs else 1
        methods = {PLAIN: Method({}, theirs, devices)}
        if self.args.batch_size == 1:  # transformers' assisted generation takes no batches
            methods[f"{ASSISTED}, default"] = Method({"assistant_model": self.draft}, theirs, devices)
            for n in self.args.assistant_tokens:
                constant = {"num_assistant_tokens": n, "num_assistant_tokens_schedule": "constant"}
                constant["assistant_confidence_threshold"] = 0.0
                methods[f"{ASSISTED}, {n}"] = Method({"assistant_model": self.draft}, theirs, devices, constant)
        for k in self.args.in_turn_lookaheads:
            config = hf_ssd.SSDConfig(lookahead=k, asynchronous=False)
            methods[f"{SD}, {k}"] = Method({"assistant_model": self.draft, "ssd_config": config}, theirs, devices)
        config = hf_ssd.SSDConfig(lookahead=self.args.lookahead or "auto", budget=self.args.budget or "auto")
        ours = {"assistant_model": self.assistant, "ssd_config": config}
        methods[SSD] = Method(ours, target_cores, len(both) if both else 2)
        return methods

    def run(self, method: Method, turn: int) -> Run:
        inputs = self.batches[turn % len(self.batches)]
        options, first = {**self.options, **method.options}, FirstToken()
        if "ssd_config" not in options:  # ours say it themselves
            options["stopping_criteria"] = StoppingCriteriaList([first])
        set_seed(turn)
        kept = {name: getattr(self.draft.generation_config, name, None) for name in method.settings}
        if kept:
            self.draft.generation_config.update(**method.settings)
        try:
            with use_cores(method.cores):
                synchronize(self.target.device)
                start = time.perf_counter()
                output = self.target.generate(**inputs, **options)
                synchronize(self.target.device)
                seconds = time.perf_counter() - start
        finally:
            if kept:
                self.draft.generation_config.update(**kept)
        rows, length = inputs["input_ids"].shape
        stats = getattr(output, "ssd_stats", None)
        tokens = stats.generated_tokens if stats else new_tokens(output.sequences[:, length:], self.target)
        prefill = stats.prefill_seconds if stats else first.at - start
        return Run(tokens, rows, prefill, seconds, stats, output.sequences)

    def measure(self, methods: dict[str, Method]) -> dict[str, Method]:
        """Adds the runs to the methods, and returns them."""
        turns = tqdm(range(self.args.repeats + 1), desc="measuring", unit="turn")
        for turn in turns:
            for name, method in methods.items():
                turns.set_postfix_str(name)
                run = self.run(method, turn)
                if turn:
                    method.runs.append(run)
        return methods


def new_tokens(tokens: torch.LongTensor, model) -> int:
    """Counts the tokens of a batch up to the end of each text."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        return tokens.numel()
    is_end = torch.isin(tokens, torch.tensor(ends, device=tokens.device))
    before = is_end.cumsum(dim=1) - is_end.long()
    return int((before == 0).sum())


# ---------------------------------------------------------------- what is said about it


def rows_of(methods: dict[str, Method]) -> list[dict]:
    """Returns a row for each method; of those that were tried with several settings, the best one."""
    rows = [row_of(name, method, methods[PLAIN].runs) for name, method in methods.items()]
    families = f"{ASSISTED}, ", f"{SD}, "
    of_families = [[row for row in rows if row["method"].startswith(family)] for family in families]
    assisted, sd = (max(tried, key=lambda row: row["over plain"], default=None) for tried in of_families)
    for row in rows:
        row["best"] = row in (assisted, sd)
        if row["method"] == SSD and sd:
            bound = theory.ssd_over_speculative_decoding_bound(sd["T_SD"], row["tokens/round"], sd["tokens/round"])
            row |= {"T_SD": sd["T_SD"], "over in turn": row["over plain"] / sd["over plain"], "Corollary 9": bound}
    names = (PLAIN, f"{ASSISTED}, default", SSD)
    return [row for row in rows if row["best"] or row["method"] in names]


def row_of(name: str, method: Method, plain: list[Run]) -> dict:
    """Returns what the table says of a method, compared with plain generate() turn by turn."""
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
    stats, n = run.stats, run.stats.rounds
    verify, wait, answer, draft = (
        sum(stats.column(f"{what}_seconds")) / n for what in ("verify", "wait", "answer", "draft")
    )
    hits = [record for record in stats.records if all(record.hits[row] for row in record.live)]
    verified = sum(record.verify_seconds for record in hits)
    predicted = theory.predict(stats)
    return {
        "acceptance": stats.acceptance_rate,
        "tokens/round": stats.tokens_per_round,
        "hit rate": stats.hit_rate,
        "lookahead": sum(stats.column("lookahead")) / n,
        "budget": sum(stats.column("budget")) / n,
        "verify ms": 1e3 * verify,
        "wait ms": 1e3 * wait,
        "answer ms": 1e3 * answer,
        "prepare ms": 1e3 * (draft - answer),
        "wait on hits / verify": sum(record.wait_seconds for record in hits) / verified if verified else None,
        "T_p": (draft - answer) / verify,
        "T_SD": None if any(stats.column("budget")) else wait / verify,
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
    """The rows as text; times in ms."""
    cells = [["", *COLUMNS, "" if sampled else "same tokens"]]
    for row in rows:
        line = [row["method"] + (" (best)" if row["best"] else "")]
        for keys, template in COLUMNS.values():
            values = [row.get(key) for key in ([keys] if isinstance(keys, str) else keys)]
            line.append("" if None in values else template.format(*values))
        cells.append([*line, "" if sampled else "yes" if row["same tokens"] else "NO"])
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(widths[i]) if i == 0 else cell.rjust(widths[i]) for i, cell in enumerate(line)).rstrip()
        for line in cells
    )


def summary(rows: list[dict]) -> str:
    """What the table says of SSD."""
    ssd = next(row for row in rows if row["method"] == SSD)
    assisted = [row for row in rows if row["method"].startswith(ASSISTED)]
    lines = [f"SSD over plain generate: {ssd['over plain']:.2f}"]
    if assisted:
        best = max(row["over plain"] for row in assisted)
        lines.append(f"SSD over assisted generation at its best: {ssd['over plain'] / best:.2f}")
    if ssd.get("Corollary 9"):
        over, bound = ssd["over in turn"], ssd["Corollary 9"]
        lines.append(f"SSD over speculative decoding in turn: {over:.2f}; at most {bound:.2f} by Corollary 9")
    if ssd.get("wait on hits / verify") is not None:
        lines.append(f"Wait on hits over verification: {ssd['wait on hits / verify']:.3f}")
    return "\n".join(lines)


def draw(tables: dict[str, list[dict]], path: Path) -> None:
    """Speeds over plain generate(), a panel for each table."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(tables), 3.2), layout="constrained")
    panels = figure.subplots(1, len(tables), squeeze=False, sharex=True)[0]
    for axes, (title, rows) in zip(panels, tables.items()):
        names, ratios = [row["method"] for row in rows], [row["over plain"] for row in rows]
        colors = ["#dd8b3c" if name == SSD else "#8fa6bf" for name in names]
        bars = axes.barh(names, ratios, color=colors)
        axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * max(row["over plain"] for rows in tables.values() for row in rows))
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("speed over plain generate")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


# ---------------------------------------------------------------- the run


def main() -> None:
    args = parse_arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target, draft, tokenizer = load_pair(args)
    cores = cores_for(args, target, draft)
    tables = {}
    with hf_ssd.launch_draft(draft, cores=cores) as assistant:
        bench = Bench(args, target, draft, assistant, batches_for(args, tokenizer, target))
        views = {"the target on one device each": False}
        if cores is not None and not args.one_table:
            views["the others on all cores"] = True
        for title, all_devices in views.items():
            methods = bench.measure(bench.methods(cores, all_devices))
            tables[title] = rows_of(methods)
            print(f"\n{title}: batch size {args.batch_size}, temperature {args.temperature:g}, times in ms")
            print(table(tables[title], sampled=args.temperature > 0))
            print(summary(tables[title]), flush=True)
            stats = methods[SSD].runs[-1].stats
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        arguments = {name: str(x) if isinstance(x, Path) else x for name, x in vars(args).items()}
        report = {
            "arguments": arguments,
            **about(),
            "cores": cores and {"target": cores.target, "drafts": cores.drafts},
            "tables": tables,
        }
        (args.output / "benchmark.json").write_text(json.dumps(report, indent=2) + "\n")
        draw(tables, args.output / "benchmark.png")
    if args.trace:
        args.trace.write_text(json.dumps(timeline.perfetto(stats)))
        stats.plot_timeline(args.trace.with_suffix(".png"))


if __name__ == "__main__":
    main()
