"""How fast is it? Plain and assisted generation, speculative decoding in turn and SSD, side by side.

example:
  hf-ssd bench Qwen/Qwen3-8B Qwen/Qwen3-0.6B --prompts prompts.jsonl --batch-size 4

The target has the same device in every row, and SSD one more for its draft, as in the paper. A second table gives the
others, on a CPU, all cores that SSD has. Methods take turns, again and again, so that what else the machine does falls
on all of them alike; each is compared with plain generate() within one turn, and the median counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import hf_ssd

from .. import timeline
from . import models, prompts

if TYPE_CHECKING:
    from ..distributed.cores import CoreShare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_models(parser)
    add_work(parser)
    add_methods(parser)


def add_work(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say what is generated."""
    work = parser.add_argument_group("work")
    work.add_argument("--prompts", help="JSON lines; default: snippets of Python, or random tokens")
    work.add_argument("--prompt-field", default="prompt")
    work.add_argument("--prompt-length", type=int, default=32, help="of random tokens")
    work.add_argument("--batch-size", type=int, default=1)
    work.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    work.add_argument("--new-tokens", type=int, default=128)
    work.add_argument("--ignore-eos", action="store_true", help="go on behind the end of the text")


def add_methods(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that [`compare`] reads."""
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


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    check_pictures(args)
    found = models.chosen(args)
    texts = prompts.prompts_from(args.prompts, args.prompt_field) if args.prompts else prompts.SNIPPETS
    target = hf_ssd.enable(models.load(found.target, found.dtype, found.device))
    draft = models.load(found.draft, found.draft_dtype, found.draft_device)
    tokenizer = models.load_tokenizer(found.target)
    if tokenizer is None:
        batches = prompts.random_batches(target, args.batch_size, args.prompt_length)
    else:
        batches = prompts.batches(texts, tokenizer, args.batch_size, found.device)
    compare(args, target, draft, batches)
    return 0


def check_pictures(args: argparse.Namespace) -> None:
    """Raises `ValueError` if pictures are asked for and cannot be drawn."""
    if (args.output or args.trace) and importlib.util.find_spec("matplotlib") is None:
        raise ValueError('pictures need matplotlib: pip install "hf_ssd[plot]"')


def compare(args: argparse.Namespace, target, draft, batches: list[dict]) -> None:
    """
    Measures all methods, prints a table, and writes what the arguments ask for.

    Args:
        args (`argparse.Namespace`): With what [`add_work`] and [`add_methods`] add.
        target (`PreTrainedModel`): An enabled model.
        draft (`PreTrainedModel`): The draft.
        batches (`list[dict]`): Inputs of generate(), used one after the other.
    """
    from .methods import ASSISTED, SSD, Bench
    from .table import draw, rows_of, summary, table

    cores, tables = cores_for(args, target, draft), {}
    with hf_ssd.launch_draft(draft, cores=cores) as assistant:
        bench = Bench(args, target, draft, assistant, batches)
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
        args.output.mkdir(parents=True, exist_ok=True)
        arguments = {name: x for name, x in vars(args).items() if isinstance(x, (int, float, str, list, type(None)))}
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


def cores_for(args: argparse.Namespace, target, draft) -> CoreShare | None:
    """Returns which cores each side gets, where both models are on the CPU."""
    from ..distributed.cores import CoreShare, divide_cores

    if args.pin:
        sides = [tuple(int(core) for core in side.split(",")) for side in args.pin]
        return CoreShare(sides[0], (sides[1],))
    return divide_cores() if target.device.type == draft.device.type == "cpu" else None


def about() -> dict:
    """Returns what the figures were made with."""
    import torch
    import transformers

    from .. import devices

    versions = {module.__name__: module.__version__ for module in (hf_ssd, torch, transformers)}
    gpus = [devices.name(device) for device in devices.accelerators()]
    return {
        "versions": {**versions, "python": platform.python_version()},
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "gpus": gpus},
    }
