"""Does this draft pay for this target? Looks at both, measures them, and says why.

example:
  hf-ssd check Qwen/Qwen3-8B Qwen/Qwen3-0.6B --draft-device cuda:1 --prompts prompts.jsonl

The exit code is 0 if the draft pays, 1 if it does not, and 2 if the two cannot work together.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from typing import TYPE_CHECKING

import hf_ssd

from . import models, prompts

if TYPE_CHECKING:
    from ..planning.planner import Planner
    from .methods import Method
    from .verdict import Figures

PROMPTS = [  # of about one length, so that one planner learns from all of them
    'class Node:\n    """A node of a tree."""\n\n    def __init__(self, name, parent=None):\n',
    'class Queue:\n    """A queue of tasks."""\n\n    def __init__(self, maxsize=0):\n',
    'class Logger:\n    """Write messages to a log."""\n\n    def __init__(self, name):\n',
    'class Writer:\n    """Write rows to a file."""\n\n    def __init__(self, path):\n',
]
WORK = {"batch_size": 1, "temperature": 0.0, "ignore_eos": True, "lookahead": None, "budget": None}
WORK |= {"assistant_tokens": [3, 5], "in_turn_lookaheads": []}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_models(parser)
    work = parser.add_argument_group("work")
    work.add_argument("--prompts", metavar="FILE", help='objects with a "prompt", one a line; default: some Python')
    work.add_argument("--new-tokens", type=int, metavar="N", default=64, help="of each answer (64)")
    work.add_argument("--repeats", type=int, metavar="N", default=5, help="turns (5); some more warm up")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    from . import doctor

    try:
        if args.new_tokens < 8 or args.repeats < 1:
            raise ValueError("--new-tokens must be at least 8 and --repeats at least 1, or nothing can be said.")
        found = models.chosen(args)
        texts = prompts.prompts_from(args.prompts)[: args.repeats + 1] if args.prompts else PROMPTS
        known, load = doctor.examine(found), doctor.load()
        if not args.json:
            print(doctor.in_words(known), flush=True)
        figures = measure(args, found, texts, load)
    except (ValueError, hf_ssd.DraftError) as error:
        if not args.json:
            raise
        print(json.dumps({"refused": str(error)}))
        return 2
    if args.json:
        figures_of_all = {**dataclasses.asdict(figures), "pays": figures.pays, "verdict": figures.verdict()}
        print(json.dumps({**known, **figures_of_all}))
    else:
        print(colored(figures.in_words(), figures.pays))
    return 0 if figures.pays else 1


def measure(args: argparse.Namespace, found: models.Models, texts: list[str], load: float) -> Figures:
    """Loads both models, and runs prompts with each way to generate, in turns."""
    from ..planning.planners import last_planner
    from .methods import ASSISTED, SSD, Bench

    target = hf_ssd.enable(models.load(found.target, found.dtype, found.device))
    draft = models.load(found.draft, found.draft_dtype, found.draft_device)
    tokenizer = models.load_tokenizer(found.target)
    if tokenizer is None:
        batches = prompts.random_batches(target, 1, 16)
    else:
        texts, is_plain = prompts.as_messages(texts, tokenizer), tokenizer.chat_template is None
        batches = prompts.batches(texts, tokenizer, 1, found.device, add_special_tokens=is_plain)
    work = argparse.Namespace(**WORK, new_tokens=args.new_tokens, repeats=args.repeats)
    with hf_ssd.launch_draft(draft) as assistant:
        bench = Bench(work, target, draft, assistant, batches)
        methods = bench.methods(cores=None, all_devices=True)
        del methods[f"{ASSISTED}, default"]
        for turn in range(len(batches)):  # the planner gets to know the pair
            bench.run(methods[SSD], turn)
        return conclude(bench.measure(methods), last_planner(target, assistant), found.shares_memory, load)


def conclude(methods: dict[str, Method], planner: Planner, shares_memory: bool, load: float) -> Figures:
    """Returns what the turns of all methods come to."""
    from ..rounds import AHEAD
    from ..rounds import PLAIN as NO_DRAFT
    from .methods import ASSISTED, PLAIN, SSD
    from .table import rows_of
    from .verdict import Figures

    rows = {row["method"]: row for row in rows_of(methods)}
    assisted = next((name for name in rows if name.startswith(ASSISTED)), None)
    ssd, runs = rows[SSD], methods[SSD].runs
    modes = [mode for run in runs for mode in run.stats.column("mode")]
    drafts = modes.count(NO_DRAFT) < len(modes) / 2
    failures = [run.stats.draft_failure for run in runs if run.stats.draft_failure]
    at_its_best = {}
    if assisted is not None:
        ratios = [ours.speed / theirs.speed for ours, theirs in zip(runs, methods[assisted].runs)]
        at_its_best = {"assisted": rows[assisted]["speed"], "over_assisted": statistics.median(ratios)}
        at_its_best["assistant_tokens"] = int(assisted.removeprefix(f"{ASSISTED}, "))
    return Figures(
        acceptance=ssd["acceptance"] if drafts else planner.costs.acceptance_seen,
        hit_rate=ssd["hit rate"],
        tokens_per_round=ssd["tokens/round"],
        verify_seconds=ssd["verify ms"] / 1e3,
        step_seconds=planner.costs.seconds_to_draft(AHEAD, 1),
        two_tokens_seconds=planner.costs.seconds_to_draft(AHEAD, 2),
        contention=planner.costs.contention,
        plan=planner.reason,
        drafts=drafts,
        predicted=ssd["predicted"],
        speed=ssd["speed"],
        plain=rows[PLAIN]["speed"],
        over_plain=ssd["over plain"],
        shares_memory=shares_memory,
        load=load,
        failure=failures[-1] if failures else None,
        **at_its_best,
    )


def colored(text: str, is_good: bool) -> str:
    """Returns the text with its last line in green or red, on a terminal that shows colours."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    *lines, last = text.split("\n")
    return "\n".join([*lines, f"\033[{32 if is_good else 31}m{last}\033[0m"])
