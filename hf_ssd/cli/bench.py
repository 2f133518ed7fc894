"""How fast is it? Plain and assisted generation, speculative decoding in turn and SSD, side by side.

example:
  hf-ssd bench Qwen/Qwen3-8B Qwen/Qwen3-0.6B --prompts prompts.jsonl --batch-size 4

The target has the same device in every row, and SSD has another device for its draft, as in the paper. On a CPU, a
second table gives the other methods all cores that SSD has. Methods take turns, so that other work of the machine
affects all of them alike. Each method is compared with plain generate() within a turn, and the median over the turns is
reported.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import platform
from pathlib import Path

import torch
import transformers

import hf_ssd

from .. import devices, timeline
from ..config import LONGEST_LOOKAHEAD
from ..distributed.cores import CoreShare, divide_cores
from . import doctor, models, options, prompts
from .methods import ASSISTED, SSD, Bench
from .options import at_least, core_numbers
from .table import draw, rows_of, summary, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_work(parser)
    add_methods(parser)


def add_work(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group("work")
    options.add_prompts(work)
    work.add_argument("--prompt-length", type=at_least(1), default=32, help="of random tokens")
    work.add_argument("--batch-size", type=at_least(1), default=1)
    options.add_answers(work, default=128, low=2)
    work.add_argument("--ignore-eos", action="store_true", help="continue after EOS")


def add_methods(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that [`compare`] reads, beside those of `options.add_speculation`."""
    method, lookahead = parser.add_argument_group("methods"), at_least(1, below=LONGEST_LOOKAHEAD + 1)
    several = {"nargs": "*", "default": [2, 3, 4, 6, 8]}
    method.add_argument("--in-turn-lookaheads", type=lookahead, **several)
    method.add_argument("--assistant-tokens", type=at_least(1), help="of assisted generation", **several)
    method.add_argument("--one-table", action="store_true", help="do not give the others all cores in a second table")
    method.add_argument("--repeats", type=at_least(1), default=5, help="turns; one more warms up")
    pinned = {"nargs": 2, "type": core_numbers, "metavar": ("TARGET", "DRAFT")}
    method.add_argument("--pin", help="cores of each side, as in 0,1,2 3", **pinned)
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, help="folder for benchmark.json and benchmark.png")
    output.add_argument("--trace", type=Path, help="a timeline of the last SSD run, for Perfetto; and a picture of it")


def run(args: argparse.Namespace) -> int:
    check_pictures(args)
    found = models.chosen(args)
    texts = prompts.prompts_from(args.prompts, args.prompt_field) if args.prompts else prompts.SNIPPETS
    print(doctor.in_words(doctor.examine(found)), flush=True)
    target, draft = found.load()
    batches = prompts.batches_for(target, found.target.tokenizer, texts, args.batch_size, args.prompt_length)
    launch = functools.partial(found.launch_draft, owns_target=False)  # whose plain generate() is measured
    compare(args, target, draft, batches, found.tokenizers, launch)
    return 0


def check_pictures(args: argparse.Namespace) -> None:
    """Creates the folders for pictures. Raises `ValueError` if pictures are asked for and cannot be written."""
    if (args.output or args.trace) and importlib.util.find_spec("matplotlib") is None:
        raise ValueError('pictures need matplotlib: pip install "hf_ssd[plot]"')
    for folder in filter(None, (args.output, args.trace and args.trace.parent)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"Nothing can be written to {folder}: {error.strerror}.") from error


def compare(args, target, draft, batches: list[dict], tokenizers: dict | None = None, launch=None) -> None:
    """Measures all methods with batches of inputs in turn, prints tables, and writes the files that are asked for."""
    cores, tables = cores_for(args, target, draft), {}
    launch = launch or functools.partial(hf_ssd.launch_draft, draft)
    with launch(target=target, cores=cores) as assistant:
        bench = Bench(args, target, draft, assistant, batches, tokenizers)
        views = {"the target on one device each": False}
        if cores is not None and not args.one_table:
            views["the others on all cores"] = True
        for title, all_devices in views.items():
            methods = bench.measure(bench.methods(cores, all_devices))
            tables[title] = rows_of(methods)
            print(f"\n{title}: batch size {args.batch_size}, temperature {args.temperature:g}, times in ms")
            print(table(tables[title], sampled=args.temperature > 0))
            print(summary(tables[title]), flush=True)
            if args.batch_size == 1 and not any(name.startswith(ASSISTED) for name in methods):
                print("transformers' assisted generation does not take this pair.", flush=True)
            stats = methods[SSD].runs[-1].stats
    if args.output:
        arguments = {name: x for name, x in vars(args).items() if isinstance(x, (int, float, str, list, type(None)))}
        report = {"arguments": arguments, **about(), "cores": cores and dataclasses.asdict(cores), "tables": tables}
        (args.output / "benchmark.json").write_text(json.dumps(report, indent=2) + "\n")
        draw(tables, args.output / "benchmark.png")
    if args.trace:
        args.trace.write_text(json.dumps(timeline.perfetto(stats)))
        stats.plot_timeline(args.trace.with_suffix(".png"))


def cores_for(args: argparse.Namespace, target, draft) -> CoreShare | None:
    """Returns the cores of each side if they are pinned or both models are on the CPU; otherwise `None`."""
    if draft is None:
        return None
    if args.pin:
        target_cores, draft_cores = args.pin
        return CoreShare(target_cores, (draft_cores,))
    on_cpu = target.device.type == draft.device.type == "cpu"
    return divide_cores(getattr(args, "draft_threads", None)) if on_cpu else None


def about() -> dict:
    """Returns the versions and the machine with which the figures were measured."""
    versions = {module.__name__: module.__version__ for module in (hf_ssd, torch, transformers)}
    gpus = [devices.name(device) for device in devices.accelerators()]
    return {
        "versions": {**versions, "python": platform.python_version()},
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "gpus": gpus},
    }
