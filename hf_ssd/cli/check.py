"""Does this draft pay for this target? Looks at both, measures them, and says why.

example:
  hf-ssd check Qwen/Qwen3-8B Qwen/Qwen3-0.6B --draft-device cuda:1 --prompts prompts.jsonl

Without a DRAFT it says which drafts would pay for the TARGET: n-grams of the text, or a trained draft of a few layers.
With --drafter ngram it measures prompt lookup, which needs no DRAFT.

The seconds count from when the models are loaded. If whole answers do not fit into them, the answers are shorter and
assisted generation is left out, and a line says how many seconds a whole check takes.

The exit code is 0 if the draft pays, 1 if it does not, 2 if the two cannot work together, and 3 if the speed was not
measured, because the seconds are too few or the answers end at once. --json prints the same keys in each case.
"""

import argparse
import dataclasses
import itertools
import json
import os
import sys
import time

import hf_ssd

from ..drafting.heads.loading import OF_TARGET
from ..planning.planner import Planner, last_planner
from ..rounds import AHEAD, EARLY
from ..rounds import PLAIN as NO_DRAFT
from ..stats import SSDStats
from . import doctor, forms, models, options, prompts
from .main import REFUSED
from .methods import ASSISTED, NO_SPEED, PLAIN, SSD, Bench, Method, NotMeasured, Run
from .options import at_least
from .schedule import LEAST, TURNS, schedule_for, seconds_asked
from .table import rows_of
from .verdict import Figures

PROMPTS = [  # of about the same length, so that a single planner learns from all of them
    'class Node:\n    """A node of a tree."""\n\n    def __init__(self, name, parent=None):\n',
    'class Queue:\n    """A queue of tasks."""\n\n    def __init__(self, maxsize=0):\n',
    'class Logger:\n    """Write messages to a log."""\n\n    def __init__(self, name):\n',
    'class Writer:\n    """Write rows to a file."""\n\n    def __init__(self, path):\n',
]
QUESTIONS = [  # for a model with a chat template: code, prose and a summary, also of about the same length
    "Write a Python class for a queue of tasks with a maximum size, with methods to add a task, to take the oldest one "
    "and to tell how many there are.",
    "Explain to a curious child, in a few sentences, why the sky is blue during the day and red in the evening, and "
    "what would be different on the Moon.",
    "Summarize in two sentences: The town built a second bridge last year. Traffic on the old one fell by a third, and "
    "shops beside it lost customers, while the farms across the river now sell twice as much in town.",
]
WORK = {"batch_size": 1, "ignore_eos": False, "assistant_tokens": [3, 5], "in_turn_lookaheads": []}
NOT_MEASURED = 3  # the exit code for a pair that works and whose speed is not known
FIGURES = [field.name for kind in (Figures, forms.Forms) for field in dataclasses.fields(kind)]
ENDS = ("pays", "verdict", "refused", "not_measured")
KEYS = list(dict.fromkeys(["target", "draft", "shares_memory", "fastest_dtype", "load", *FIGURES, *ENDS]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group("work")
    options.add_prompts(work)
    options.add_answers(work, default=64, low=8)
    count, seconds = {"type": at_least(1), "metavar": "N"}, {"type": at_least(1, float), "metavar": "S"}
    work.add_argument("--repeats", default=5, help="turns at most (5); some calls before them warm up", **count)
    work.add_argument("--seconds", default=120.0, help="of measuring, after loading (120)", **seconds)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    known = {"load": doctor.load()}
    try:
        found = models.chosen(args, needs_draft=False)
        if found.config.drafter in OF_TARGET:
            how = f"--drafter {found.config.drafter}"
            raise ValueError(f"hf-ssd check does not measure {how}; compare with hf-ssd bench TARGET {how}.")
        texts = prompts.prompts_from(args.prompts, args.prompt_field)[: args.repeats + 1] if args.prompts else None
        known |= doctor.examine(found, tries_dtypes=True)
        if not args.json:
            print(doctor.in_words(known), flush=True)
        texts = texts or prompts_for(found.target.tokenizer)
        is_measured = found.draft or found.config.drafter == EARLY
        figures = measure(args, found, texts, known) if is_measured else forms.measure(args, found.target, texts, tell)
    except NotMeasured as error:
        known["not_measured"], code = str(error), NOT_MEASURED
        if not args.json:
            tell(f"not measured: {error}")
    except (ValueError, hf_ssd.DraftError) as error:
        if not args.json:
            raise
        known["refused"], code = str(error), REFUSED
    else:
        known |= {**dataclasses.asdict(figures), "pays": figures.pays, "verdict": figures.verdict()}
        code = 0 if figures.pays else 1
        if not args.json:
            print(colored(figures.in_words(), figures.pays))
    if args.json:
        print(json.dumps({**dict.fromkeys(KEYS), **known}))
    return code


def prompts_for(tokenizer) -> list[str]:
    """Returns questions for a model with a chat template, and otherwise texts to continue."""
    return PROMPTS if tokenizer is None or tokenizer.chat_template is None else QUESTIONS


def measure(args: argparse.Namespace, found: models.Models, texts: list[str], known: dict) -> Figures:
    """Loads the models and runs prompts with each method, as often as the first answers say that there is time for."""
    tell("loading both models" if found.draft else "loading the target")
    target, draft = found.load()
    batches = prompts.batches_for(target, found.target.tokenizer, texts)
    work = argparse.Namespace(**{**vars(args), **WORK})
    if draft is not None:
        tell("starting the draft's worker")
    with found.launch_draft(target, owns_target=False) as assistant:  # whose plain generate() is measured
        bench = Bench(work, target, draft, assistant, batches, found.tokenizers)
        methods = bench.methods(cores=None, all_devices=True)
        methods.pop(f"{ASSISTED}, default", None)  # a head has no such methods
        methods = {name: methods[name] for name in (PLAIN, SSD, *methods)}  # in this order
        target.generate(**batches[0], max_new_tokens=1, do_sample=False)  # reads weights that loading has mapped
        # 1. A short answer of each, as long as it takes.
        start, wanted = time.perf_counter(), args.max_new_tokens
        bench.options["max_new_tokens"] = min(LEAST, wanted)
        tell("a first answer, decoded plainly")
        plain = bench.run(methods[PLAIN], 0)
        tell("a first answer with SSD")
        learning = [bench.run(methods[SSD], 0)]  # runs in which the planner measures the pair
        # 2. How much more fits.
        if not plain.speed:
            raise NotMeasured(NO_SPEED)
        # The first answer with SSD also packs weights and tries the pair; the next answers are no slower than plain.
        spent, of = time.perf_counter() - start, (plain, len(methods), wanted, args.repeats)
        schedule, asked = schedule_for(args.seconds - spent, *of), seconds_asked(spent, *of)
        whole = f"a check of this pair takes about {max(1, round(asked / 60))} min: --seconds {asked}"
        if schedule is None:
            busy = f"before, {known['load']:.2f} programs for each core"
            raise NotMeasured(f"{whole} (the first answers took {spent:.0f} s; {busy})")
        skipped, work.repeats = schedule.methods < len(methods), schedule.turns
        if schedule.tokens < wanted or skipped or schedule.before < TURNS:
            tell(f"{whole}; now answers of {schedule.tokens} tokens are compared")
        methods = dict(itertools.islice(methods.items(), schedule.methods))
        bench.options["max_new_tokens"], bench.deadline = schedule.tokens, start + args.seconds
        bench.calls = schedule.before + schedule.turns * schedule.methods
        # 3. The planner measures the pair, and then the methods take turns.
        for turn in range(1, schedule.before + 1):
            tell(f"getting to know the pair, call {turn} of {schedule.before}")
            learning.append(bench.run(methods[SSD], turn))
        bench.measure(methods, warm_ups=0)
        return conclude(methods, learning, last_planner(target, assistant or target), known, skipped)


def tell(what: str) -> None:
    """Prints the current step on stderr, also if stderr is no terminal."""
    print(f"hf-ssd check: {what}", file=sys.stderr, flush=True)


def acceptance_of(runs: list[Run]) -> float | None:
    """Returns the share of accepted tokens among the tested tokens of all runs, or `None` without drafted tokens."""
    stats = SSDStats(records=[record for run in runs for record in run.stats.records])
    return stats.acceptance_rate if any(k and hit is not None for k, _, hit in stats.verified_rows()) else None


def conclude(methods: dict[str, Method], first: list[Run], planner: Planner, known: dict, skipped: bool) -> Figures:
    """Returns the figures of the pair, or of a target without a draft. `first` holds SSD's runs before these turns."""
    rows = {row["method"]: row for row in rows_of(methods)}
    assisted = next((row for name, row in rows.items() if name.startswith(ASSISTED)), None)
    ssd, runs = rows[SSD], methods[SSD].runs
    records = [record for run in runs for record in run.stats.records]
    looks_up, step, two_tokens = "draft" not in known, None, None
    if any(line.count for line in planner.costs.durations.step.values()) and not looks_up:
        step, two_tokens = (planner.costs.seconds_to_draft(AHEAD, count) for count in (1, 2))
    drafts = sum(record.mode == NO_DRAFT and not record.early for record in records) < len(records) / 2
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
        shares_memory=known.get("shares_memory", False),
        load=known["load"],
        failure=next((run.stats.draft_failure for run in reversed(runs) if run.stats.draft_failure), None),
        assisted=assisted and assisted["speed"],
        over_assisted=assisted and ssd["over plain"] / assisted["over plain"],
        assistant_tokens=assisted and int(assisted["method"].removeprefix(f"{ASSISTED}, ")),
        skipped=skipped,
        looks_up=looks_up,
    )


def colored(text: str, is_good: bool) -> str:
    """Returns the text with its last line in green or red, on a terminal that shows colours."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    *lines, last = text.split("\n")
    return "\n".join([*lines, f"\033[{32 if is_good else 31}m{last}\033[0m"])
