"""Does this draft pay for this target? Looks at both, measures them, and says why.

example:
  hf-ssd check Qwen/Qwen3-8B Qwen/Qwen3-0.6B --draft-device cuda:1 --prompts prompts.jsonl

Without a DRAFT it says which drafts would pay for the TARGET: n-grams of the text, or a trained draft of a few layers.
With --drafter ngram it measures prompt lookup, which needs no DRAFT.

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
from ..rounds import AHEAD
from ..rounds import PLAIN as NO_DRAFT
from ..stats import SSDStats
from . import doctor, forms, models, options, prompts
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
WORK = {"batch_size": 1, "ignore_eos": True, "assistant_tokens": [3, 5], "in_turn_lookaheads": []}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group("work")
    options.add_prompts(work)
    options.add_answers(work, default=64, low=8)
    count, seconds = {"type": at_least(1), "metavar": "N"}, {"type": at_least(1, float), "metavar": "S"}
    work.add_argument("--repeats", default=5, help="turns at most (5); some more warm up", **count)
    work.add_argument("--seconds", default=60.0, help="for the measurement in all (60)", **seconds)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    try:
        found = models.chosen(args, needs_draft=False)
        if found.config.drafter == "mtp":
            raise ValueError("hf-ssd check measures no MTP layer; compare with hf-ssd bench TARGET --drafter mtp.")
        texts = prompts.prompts_from(args.prompts, args.prompt_field)[: args.repeats + 1] if args.prompts else PROMPTS
        known, load = doctor.examine(found), doctor.load()
        if not args.json:
            print(doctor.in_words(known), flush=True)
        is_measured = found.draft or found.config.drafter == "ngram"
        figures = measure(args, found, texts, load) if is_measured else forms.measure(args, found.target, texts, tell)
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
    Loads the models, and runs prompts with each method, in turns. The time of a call is limited, so that a turn that
    warms up and a turn that counts fit into `args.seconds`. Prompt lookup is measured without a draft.
    """
    tell("loading both models" if found.draft else "loading the target")
    target, draft = found.load()
    batches = prompts.batches_for(target, found.target.tokenizer, texts)
    work = argparse.Namespace(**{**vars(args), **WORK})
    launched = contextlib.nullcontext()
    if draft is not None:
        launched = hf_ssd.launch_draft(draft, device=found.draft.device, num_threads=found.draft_threads, target=target)
    with launched as assistant:
        bench = Bench(work, target, draft, assistant, batches, found.tokenizers)
        methods = bench.methods(cores=None, all_devices=True)
        methods.pop(f"{ASSISTED}, default", None)  # an EAGLE-3 head has no such methods
        deadline = time.perf_counter() + args.seconds
        bench.options["max_time"] = args.seconds / (len(batches) + 2 * len(methods))
        first = []  # runs in which the planner measures the pair
        for turn in range(len(batches)):
            tell(f"getting to know the pair, call {turn + 1} of {len(batches)}")
            first.append(bench.run(methods[SSD], turn))
            if not first[-1].stats.rounds:
                raise ValueError(f"--seconds {args.seconds:g} is too short: a call takes longer than its share of it.")
        bench.measure(methods, deadline)
        planner, is_alone = last_planner(target, assistant or target), draft is None
        return conclude(methods, first, planner, not is_alone and found.shares_memory, load, is_alone)


def tell(what: str) -> None:
    """Prints the current step on stderr, also if stderr is no terminal."""
    print(f"hf-ssd check: {what}", file=sys.stderr, flush=True)


def acceptance_of(runs: list[Run]) -> float | None:
    """Returns the share of accepted tokens among the tested tokens of all runs, or `None` without drafted tokens."""
    stats = SSDStats(records=[record for run in runs for record in run.stats.records])
    return stats.acceptance_rate if any(k and hit is not None for k, _, hit in stats.verified_rows()) else None


def conclude(
    methods: dict[str, Method],
    first: list[Run],
    planner: Planner,
    shares_memory: bool,
    load: float,
    looks_up: bool = False,
) -> Figures:
    """
    Returns the figures of the pair, or of prompt lookup if `looks_up`, from the runs of all methods. `first` holds
    SSD's runs before these turns.
    """
    rows = {row["method"]: row for row in rows_of(methods)}
    assisted = next((name for name in rows if name.startswith(ASSISTED)), None)
    ssd, runs = rows[SSD], methods[SSD].runs
    records = [record for run in runs for record in run.stats.records]
    steps = [planner.costs.seconds_to_draft(AHEAD, count) for count in (1, 2)]
    step, two_tokens = (None if math.isnan(seconds) or looks_up else seconds for seconds in steps)
    drafts = sum(record.mode == NO_DRAFT and not record.lookup for record in records) < len(records) / 2
    failures = [run.stats.draft_failure for run in runs if run.stats.draft_failure]
    best = {}
    if assisted is not None:
        ratios = [ours.speed / theirs.speed for ours, theirs in zip(runs, methods[assisted].runs)]
        best = {"assisted": rows[assisted]["speed"], "over_assisted": statistics.median(ratios)}
        best["assistant_tokens"] = int(assisted.removeprefix(f"{ASSISTED}, "))
    return Figures(
        acceptance=acceptance_of(first + runs),
        hit_rate=ssd["hit rate"],
        tokens_per_round=ssd["tokens/round"],
        verify_seconds=ssd["verify ms"] / 1e3,
        step_seconds=step,
        two_tokens_seconds=two_tokens,
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
        looks_up=looks_up,
        **best,
    )


def colored(text: str, is_good: bool) -> str:
    """Returns the text with its last line in green or red, on a terminal that shows colours."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    *lines, last = text.split("\n")
    return "\n".join([*lines, f"\033[{32 if is_good else 31}m{last}\033[0m"])
