"""Everything about this machine's GPUs in one report: do the tests pass, how fast is it, where does a round go?

    python examples/gpu_report.py --output report
    python examples/gpu_report.py --output report --only speed --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B
    python examples/gpu_report.py --output report --dry-run

With one GPU, target and draft are two processes on it; with two they are apart; with more, several share the target
by tensor parallelism. The pairs are made on the GPU, without a download. All takes eight minutes on one large GPU: each
part has a time budget, what does not fit is dropped and named, and the report is written again whenever something is
known. `--dry-run` does all of it on the CPU with tiny models. How to read the report: docs/gpu.md.
"""

import argparse
import signal
import sys
import time
from pathlib import Path

from gpu_parts import ranks, rounds, speed, tests
from gpu_parts.clock import Clock, first_line
from gpu_parts.devices import about, find_layout
from gpu_parts.results import PARTS, Report
from transformers.utils import logging

SECONDS = {"tests": 110.0, "speed": 270.0, "profile": 80.0}  # with what lies between, eight minutes
MEASURES = {"tests": tests.measure, "speed": speed.measure, "profile": rounds.measure}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for report.md, report.json, timeline.png")
    parser.add_argument("--only", choices=PARTS, help="one part; the others stay as they are in the folder")
    parser.add_argument("--dry-run", action="store_true", help="everything, but on the CPU with tiny models")
    parser.add_argument("--target", help="hub id or folder; default: two random pairs, about 1B/0.1B and 8B/0.5B")
    parser.add_argument("--draft", help="hub id or folder")
    parser.add_argument("--target-ranks", type=int, help="GPUs that share the target; default: by their number")
    parser.add_argument("--max-new-tokens", type=int, help="of each row in each call; default: 48")
    parser.add_argument("--turns", type=int, help="of each method at most; default: 5")
    parser.add_argument("--seconds", type=float, help="for each part; default: 110 tests, 270 speed, 80 profile")
    args = parser.parse_args(arguments)
    if (args.target is None) != (args.draft is None):
        parser.error("--target and --draft make a pair: name both or neither")
    args.max_new_tokens = args.max_new_tokens or (12 if args.dry_run else 48)
    args.turns = args.turns or (1 if args.dry_run else 5)
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    layout = find_layout(args.dry_run, args.target_ranks)
    if layout is None:
        print("There is no GPU here. To see that everything runs, add --dry-run.", file=sys.stderr)
        return 2
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the draft's process ends with this one
    report, start = Report(args.output, about(layout, args.dry_run)), time.monotonic()
    seconds = {name: args.seconds or SECONDS[name] for name in ([args.only] if args.only else PARTS)}
    # A part that took longer, because nothing interrupts a compiler, leaves less for the next.
    for name, share in Clock(sum(seconds.values())).shares(list(seconds), list(seconds.values())):
        measure = ranks.measure if name == "speed" and layout.target_ranks > 1 else MEASURES[name]
        try:
            measure(args, layout, report, share.left)
        except Exception as error:  # the other parts do not depend on it
            report.data.setdefault(name, {})["failed"] = first_line(error)
        report.now(None)
        print(f"{name}: written to {args.output / 'report.md'} after {time.monotonic() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
