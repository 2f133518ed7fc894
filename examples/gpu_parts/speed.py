"""How fast is it? Methods take turns; what there is no time for is named."""

import argparse
import contextlib
import dataclasses
import math
import statistics

import torch
from transformers import CompileConfig

import hf_ssd
from hf_ssd.cli.methods import PLAIN, SSD, Bench, Method, Run
from hf_ssd.cli.table import figures_of

from .clock import Clock, first_line
from .devices import Layout
from .pairs import Pair, load, memory_is_freed, names_of
from .results import MEASURED, NOT_REACHED, Report

COMPILED = "compiled"  # what the models are in the settings in which that is compared
COMPILED_PLAIN, COMPILED_SSD = f"{PLAIN}, compiled", f"{SSD}, compiled"
EAGER_SSD = f"{SSD}, eager"  # without CUDA graphs
LOOKAHEADS = (3, 5, 8)  # of assisted generation, and of SSD in turn
DRAFTED = {"assisted": "transformers' assisted", "in turn": "SSD in turn"}
SETTINGS = [(0.0, 1), (1.0, 1), (0.0, 8), (1.0, 8)]  # temperature, rows
COMPILED_SETTINGS = [(0.0, 1), (1.0, 1)]
COMPILING = 3.0  # times the share of another setting: the first one compiles
LATE = {"joins": 2, "measured_from": 4}  # turns of methods that compile
WARM_UP_TOKENS = 8


@dataclasses.dataclass
class Cell:
    """
    One method in one setting.

    Args:
        method ([`~hf_ssd.cli.methods.Method`]): What is measured.
        record (`dict`): What the report says of it.
        compiles (`bool`): Whether the target is compiled meanwhile.
        is_soon_warm (`bool`): Whether a few tokens warm it up: nothing is compiled, and nothing is learned.
        joins, measured_from (`int`): The turns in which it runs first, and from which on it is measured. Methods that
            compile join later: if that takes all the time, the others have been measured. And a second run meets
            sizes that the first one did not.
        runs (`dict[int, Run]`): What was measured, by turn.
    """

    method: Method
    record: dict
    compiles: bool = False
    is_soon_warm: bool = False
    joins: int = 0
    measured_from: int = 1
    runs: dict[int, Run] = dataclasses.field(default_factory=dict)


def measure(args, layout, report: Report, seconds: float) -> None:
    """Measures all pairs, each in its share of the time."""
    part, clock = report.begin("speed", {"cells": []}), Clock(seconds)
    names = names_of(args)
    records = {name: register(part["cells"], name, settings_of(args)) for name in names}
    report.save()
    for name, share in clock.shares(names):
        try:
            report.now(f"speed, {name}: loading")
            with memory_is_freed():
                load_and_measure(name, records[name], layout, args, report, share)
        except Exception as error:
            close(records[name], f"failed: {first_line(error)}")
    report.save()


def load_and_measure(name: str, records: dict, layout: Layout, args, report: Report, clock: Clock) -> None:
    pair = load(name, args, layout)
    with contextlib.ExitStack() as stack:
        assistants = {SSD: stack.enter_context(pair.launch())}
        measure_pair(pair, records, assistants, layout, args, report, clock, stack)


def settings_of(args) -> list[tuple[str, tuple[float, int], dict[str, str]]]:
    """Returns how the models are, temperature and rows, and the methods with their families."""
    drafted = {f"{family}, {k}": family for family in DRAFTED.values() for k in LOOKAHEADS}
    as_they_are = {PLAIN: PLAIN, **drafted, SSD: SSD, EAGER_SSD: EAGER_SSD}
    compiled = {name: name for name in (PLAIN, COMPILED_PLAIN, SSD, COMPILED_SSD)}
    settings = [("as they are", setting, as_they_are) for setting in SETTINGS]
    return settings + [(COMPILED, setting, compiled) for setting in COMPILED_SETTINGS[: 1 if args.dry_run else None]]


def register(cells: list[dict], pair: str, settings: list[tuple]) -> dict[tuple, dict[str, dict]]:
    """Returns the records of a pair's cells by setting and method, each of them not reached yet."""
    records = {}
    for kind, (temperature, rows), methods in settings:
        title = f"{pair}, T = {temperature:g}, {rows} row{'s' * (rows > 1)}, models {kind}"
        records[kind, temperature, rows] = {
            name: {"setting": title, "method": name, "family": family, "result": NOT_REACHED}
            for name, family in methods.items()
            if rows == 1 or family != DRAFTED["assisted"]  # which takes no batches
        }
        cells += records[kind, temperature, rows].values()
    return records


def close(records: dict, result: str) -> None:
    """Gives a result to all cells that have none."""
    for record in (record for setting in records.values() for record in setting.values()):
        if record["result"] == NOT_REACHED:
            record["result"] = result


def measure_pair(pair: Pair, records: dict, assistants: dict, layout: Layout, args, report, clock, stack) -> None:
    """
    Args:
        pair ([`Pair`]): The models.
        records (`dict`): See [`register`].
        assistants (`dict`): The draft worker of each method. The one of compiled SSD is added when its turn comes.
        layout ([`Layout`]): Where the models are.
        args, report, clock: See [`measure`].
        stack (`contextlib.ExitStack`): Closes the worker that is added.
    """
    weights = [COMPILING if key == (COMPILED, *COMPILED_SETTINGS[0]) else 1.0 for key in records]
    for key, share in clock.shares(list(records), weights):
        kind, temperature, rows = key
        if kind == COMPILED and COMPILED_SSD not in assistants and not share.is_over:
            try:
                report.now(f"speed, {pair.name}: compiling the draft")
                assistants[COMPILED_SSD] = stack.enter_context(pair.launch(compile=True))
            except Exception as error:
                assistants[COMPILED_SSD] = None
                for setting in records.values():
                    setting.get(COMPILED_SSD, {})["result"] = f"failed: {first_line(error)}"
        cells = {
            name: cell_of(record, pair, assistants, layout)
            for name, record in records[key].items()
            if record["result"] == NOT_REACHED
        }
        bench = bench_of(pair.target, pair.draft, assistants[SSD], pair.batches(rows), temperature, rows, args)
        take_turns(bench, cells, args.turns, report, share)
        close({key: records[key]}, "dropped: the time was used up")
    close(records, "dropped: the time was used up")


def bench_of(target, draft, assistant, batches, temperature: float, rows: int, args) -> Bench:
    settings = {"max_new_tokens": args.max_new_tokens, "temperature": temperature, "batch_size": rows}
    return Bench(argparse.Namespace(**settings, ignore_eos=False), hf_ssd.enable(target), draft, assistant, batches)


def cell_of(record: dict, pair: Pair, assistants: dict, layout: Layout) -> Cell:
    name, family = record["method"], record["family"]
    options, settings, how = {}, {}, {}
    if name == PLAIN:
        how["is_soon_warm"] = True
    elif name == COMPILED_PLAIN:
        config = CompileConfig()
        config._compile_all_devices = pair.target.device.type == "cpu"  # otherwise transformers compiles on GPUs alone
        options, how = {"cache_implementation": "static", "compile_config": config}, LATE
    elif family in DRAFTED.values():
        k, options, how = int(name.split(", ")[-1]), {"assistant_model": pair.draft}, {"is_soon_warm": True}
        if family == DRAFTED["assisted"]:
            settings = {"num_assistant_tokens": k, "num_assistant_tokens_schedule": "constant"}
            settings["assistant_confidence_threshold"] = 0.0
        else:
            options["ssd_config"] = hf_ssd.SSDConfig(lookahead=k, asynchronous=False)
    else:
        config = hf_ssd.SSDConfig(cuda_graphs=False if name == EAGER_SSD else "auto")
        options = {"assistant_model": assistants.get(SSD if name == EAGER_SSD else name), "ssd_config": config}
        how = {"compiles": True, **LATE} if name == COMPILED_SSD else {}
    uses_worker = isinstance(options.get("assistant_model"), hf_ssd.DraftAssistant)
    devices = layout.devices if uses_worker else layout.target_ranks
    return Cell(Method(options, None, devices, settings), record, **how)


def take_turns(bench: Bench, cells: dict[str, Cell], turns: int, report: Report, clock: Clock) -> None:
    """
    Runs the methods one after the other, again and again, until each has as many runs as asked or the time is up. A
    method that raises does not come again.
    """
    for turn in range(max(cell.measured_from for cell in cells.values()) + turns):
        for name, cell in list(cells.items()):
            if turn < cell.joins:
                continue
            if clock.is_over:
                return
            report.now(f"speed, {cell.record['setting']}: {name}, turn {turn}")
            is_warm = turn >= cell.measured_from
            try:
                run = run_once(bench, cell, turn, is_warm)
            except Exception as error:
                cell.record["result"] = f"failed: {first_line(error)}"
                del cells[name]
                continue
            if is_warm:
                cell.runs[turn] = run
                cell.record.update(figures(cell, cells.get(PLAIN), bench.args.temperature))
                if run.stats and run.stats.rounds and any(run.stats.column("budget")):
                    report.draw_timeline(run.stats, f"{name}, {cell.record['setting']}")
            report.save()


def run_once(bench: Bench, cell: Cell, turn: int, is_warm: bool) -> Run:
    method = cell.method
    if cell.is_soon_warm and not is_warm:
        method = dataclasses.replace(method, options={**method.options, "max_new_tokens": WARM_UP_TOKENS})
    with compiled(bench.target) if cell.compiles else contextlib.nullcontext():
        run = bench.run(method, turn)
    if run.stats and run.stats.draft_failure:
        raise RuntimeError(f"the draft failed: {run.stats.draft_failure}")
    return run


@contextlib.contextmanager
def compiled(model):
    """Within this the model is one that was compiled by `model.compile(dynamic=True)`."""
    model.compile(dynamic=True)
    try:
        yield
    finally:
        model._compiled_call_impl = None


def figures(cell: Cell, plain: Cell | None, temperature: float) -> dict:
    """What the report says of a cell that was measured."""
    runs = list(cell.runs.values())
    speed = statistics.median(run.speed for run in runs)
    result = {"result": MEASURED, "turns": len(runs), "speed": speed, "per device": speed / cell.method.devices}
    pairs = [(run, plain.runs[turn]) for turn, run in cell.runs.items() if plain and turn in plain.runs]
    if pairs:
        ratios = [run.speed / base.speed for run, base in pairs]
        result["over plain"] = statistics.median(ratios)
        result["error"] = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else None
        if not temperature:
            result["as plain"] = statistics.fmean(agreement(run.sequences, base.sequences) for run, base in pairs)
    return result | (figures_of(runs) if all(run.stats and run.stats.rounds for run in runs) else {})


def agreement(ours: torch.LongTensor, theirs: torch.LongTensor) -> float:
    """Returns how much of the output, prompt included, is the same up to the first difference; mean over rows."""
    width = min(ours.shape[1], theirs.shape[1])
    same = (ours[:, :width] == theirs[:, :width]).long().cumprod(dim=1)
    return same.sum().item() / (len(ours) * max(ours.shape[1], theirs.shape[1]))
