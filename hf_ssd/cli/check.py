"""Does this draft pay for this target? Looks at both, measures them, and says why.

example:
  hf-ssd check Qwen/Qwen3-8B Qwen/Qwen3-0.6B --draft-device cuda:1 --prompts prompts.jsonl

The exit code is 0 if the draft pays, 1 if it does not, and 2 if the two cannot work together.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import statistics
import sys
import time

import hf_ssd

from ..planning.planner import Planner
from ..planning.planners import last_planner
from ..rounds import AHEAD, RoundRecord
from ..rounds import PLAIN as NO_DRAFT
from ..stats import SSDStats
from . import doctor, models, prompts
from .methods import ASSISTED, PLAIN, SSD, Bench, Method, Run
from .options import at_least
from .table import rows_of
from .verdict import Figures

PROMPTS = [  # of about the same length, so that a single planner learns from all of them
    'class Node:\n    """A node of a tree."""\n\n    def __init__(self, name, parent=None):\n',
    'class Queue:\n    """A queue of tasks."""\n\n    def __init__(self, maxsize=0):\n',
    'class Logger:\n    """Write messages to a log."""\n\n    def __init__(self, name):\n',
    'class Writer:\n    """Write rows to a file."""\n\n    def __init__(self, path):\n',
]
WORK = {"batch_size": 1, "temperature": 0.0, "ignore_eos": True, "lookahead": None, "budget": None}
WORK |= {"assistant_tokens": [3, 5], "in_turn_lookaheads": []}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_models(parser)
    models.add_drafter(parser)
    work = parser.add_argument_group("work")
    work.add_argument("--prompts", metavar="FILE", help='objects with a "prompt", one a line; default: some Python')
    count, seconds = {"metavar": "N"}, {"metavar": "S", "type": at_least(1, float)}
    work.add_argument("--new-tokens", type=at_least(8), default=64, help="of each answer (64)", **count)
    work.add_argument("--repeats", type=at_least(1), default=5, help="turns at most (5); some more warm up", **count)
    work.add_argument("--seconds", default=60.0, help="for the measurement in all (60)", **seconds)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    try:
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
    """
    Loads both models, and runs prompts with each method, in turns. The time of a call is limited, so that a turn that
    warms up and a turn that counts fit into `args.seconds`.
    """
    tell("loading the models")
    (target, draft), tokenizer = found.load(), found.tokenizer
    if tokenizer is None:
        batches = prompts.random_batches(target, 1, 16)
    else:
        texts, is_plain = prompts.as_messages(texts, tokenizer), tokenizer.chat_template is None
        batches = prompts.batches(texts, tokenizer, 1, found.device, add_special_tokens=is_plain)
    work = argparse.Namespace(**WORK, new_tokens=args.new_tokens, repeats=args.repeats, drafter=found.drafter)
    with contextlib.nullcontext() if draft is None else hf_ssd.launch_draft(draft) as assistant:
        bench = Bench(work, target, draft, assistant, batches, found.tokenizers)
        methods = bench.methods(cores=None, all_devices=True)
        methods.pop(f"{ASSISTED}, default", None)
        deadline = time.perf_counter() + args.seconds
        bench.options["max_time"] = args.seconds / (len(batches) + 2 * len(methods))
        first = []  # runs in which the planner measures the pair
        for turn in range(len(batches)):
            tell(f"getting to know the pair, call {turn + 1} of {len(batches)}")
            first.append(bench.run(methods[SSD], turn))
            if not first[-1].stats.rounds:
                raise ValueError(
                    f"--seconds {args.seconds:g} is too short: one call takes longer than its share of it."
                )
        bench.measure(methods, deadline)
        figures = conclude(methods, first, last_planner(target, assistant or target), found.shares_memory, load)
        return dataclasses.replace(figures, looks_up=draft is None)


def tell(what: str) -> None:
    """Prints the current step on stderr, also if stderr is no terminal."""
    print(f"hf-ssd check: {what}", file=sys.stderr, flush=True)


def acceptance_of(runs: list[Run]) -> float | None:
    """Returns the share of accepted tokens among the tested tokens of all runs, or `None` without drafted tokens."""
    stats = SSDStats(records=records_of(runs))
    return stats.acceptance_rate if any(k for k, _, _ in stats.verified_rows()) else None


def records_of(runs: list[Run]) -> list[RoundRecord]:
    return [record for run in runs for record in run.stats.records]


def if_known(seconds: float) -> float | None:
    return None if math.isnan(seconds) else seconds


def conclude(
    methods: dict[str, Method], first: list[Run], planner: Planner, shares_memory: bool, load: float
) -> Figures:
    """Returns the figures of the pair from the runs of all methods. `first` holds SSD's runs before these turns."""
    rows = {row["method"]: row for row in rows_of(methods)}
    assisted = next((name for name in rows if name.startswith(ASSISTED)), None)
    ssd, runs = rows[SSD], methods[SSD].runs
    records = records_of(runs)
    drafts = sum(record.mode == NO_DRAFT for record in records) < len(records) / 2
    failures = [run.stats.draft_failure for run in runs if run.stats.draft_failure]
    at_its_best = {}
    if assisted is not None:
        ratios = [ours.speed / theirs.speed for ours, theirs in zip(runs, methods[assisted].runs)]
        at_its_best = {"assisted": rows[assisted]["speed"], "over_assisted": statistics.median(ratios)}
        at_its_best["assistant_tokens"] = int(assisted.removeprefix(f"{ASSISTED}, "))
    return Figures(
        acceptance=acceptance_of(first + runs),
        hit_rate=ssd["hit rate"],
        tokens_per_round=ssd["tokens/round"],
        verify_seconds=ssd["verify ms"] / 1e3,
        step_seconds=if_known(planner.costs.seconds_to_draft(AHEAD, 1)),
        two_tokens_seconds=if_known(planner.costs.seconds_to_draft(AHEAD, 2)),
        contention=planner.costs.contention,
        plan=planner.reason_of(records),
        drafts=drafts,
        predicted=ssd["predicted"],
        speed=ssd["speed"],
        plain=rows[PLAIN]["speed"],
        over_plain=ssd["over plain"] if drafts else None,
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
