"""The speed of a target that several devices share: the methods of speed.py under torchrun, as in generate_tp.py."""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import hf_ssd
from hf_ssd.cli.methods import PLAIN, SSD
from hf_ssd.cli.models import Model

from .clock import Clock, first_line, run_for
from .devices import Layout
from .pairs import Pair, load, memory_is_freed, names_of, prompts_of
from .results import Report
from .speed import DRAFTED, LOOKAHEADS, SETTINGS, close, measure_pair, register

EXAMPLES = Path(__file__).parents[1]
GRACE = 60.0  # seconds for the ranks to start and to end
METHODS = {PLAIN: PLAIN, **{f"{DRAFTED['in turn']}, {k}": DRAFTED["in turn"] for k in LOOKAHEADS}, SSD: SSD}


def measure(args, layout, report: Report, seconds: float) -> None:
    """Starts the ranks for each pair. The first of them writes the report meanwhile."""
    report.begin("speed", {"cells": []})
    for name, share in Clock(seconds).shares(names_of(args)):
        with tempfile.TemporaryDirectory() as folder:
            target, draft = args.target, args.draft
            if target is None:
                report.now(f"speed, {name}: making the pair")
                with memory_is_freed():
                    target, draft = save(load(name, args, layout), Path(folder))
            settings = {"name": name, "target": target, "draft": draft, "output": str(args.output)}
            settings |= {"max_new_tokens": args.max_new_tokens, "turns": args.turns, "dry_run": args.dry_run}
            settings["seconds"] = share.left
            failure = run_ranks(layout.target_ranks + 1, settings, report.folder / "ranks.txt")
        report.data = Report(report.folder).data
        if failure:
            report.data["speed"]["failed"] = f"{name}: {failure}"
        report.save()


def save(pair: Pair, folder: Path) -> tuple[str, str]:
    """Writes the models where each rank can load its part of them."""
    pair.target.save_pretrained(folder / "target")
    pair.draft.save_pretrained(folder / "draft")
    return str(folder / "target"), str(folder / "draft")


def run_ranks(count: int, settings: dict, log: Path) -> str | None:
    """Returns what went wrong."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command += ["-m", "gpu_parts.ranks", json.dumps(settings)]
    paths = [str(EXAMPLES), str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    code = run_for(settings["seconds"] + GRACE, command, log, env=environment)
    if code is None:
        return "the ranks took too long; see ranks.txt"
    return f"torchrun ended with {code}; see ranks.txt" if code else None


def main() -> None:
    """One of the ranks."""
    args = argparse.Namespace(**json.loads(sys.argv[1]))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    roles = hf_ssd.distributed.init_roles()
    dtype = torch.float32 if args.dry_run else torch.bfloat16
    if roles.is_draft:
        roles.serve(args.draft, dtype=dtype)
        return
    report = Report(Path(args.output) if roles.is_leader else Path(tempfile.mkdtemp()))
    cells = report.data.setdefault("speed", {"cells": []})["cells"]
    settings = [("as they are, several target ranks", setting, METHODS) for setting in SETTINGS]
    records = register(cells, args.name, settings)
    # All ranks must do the same, so one of them reads the clock.
    clock = Clock(args.seconds, agree=lambda is_over: roles.ranks.share_values(is_over))
    try:
        division = roles.target_config(args.target)
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype, distributed_config=division)
        target, tokenizer = target.to(roles.device).eval(), Model(args.target).tokenizer
        pair = Pair(args.name, target, roles.draft, tokenizer, roles.device, prompts_of())
        layout = Layout(roles.device, roles.device, roles.tp_size)
        measure_pair(pair, records, {SSD: roles.draft}, layout, args, report, clock, None)
    except Exception as error:
        close(records, f"failed: {first_line(error)}")
        report.save()
        raise
    report.save()
    roles.shutdown()


if __name__ == "__main__":
    main()
