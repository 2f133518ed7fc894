"""Has it become slower? Two minutes of the benchmark, compared with figures that were kept.

    python examples/regression.py --keep before.json
    python examples/regression.py --compare before.json

Ratios to plain generate() of the same run are compared, not times, so two runs on one machine can be; two machines
cannot. What differs by less than the spread between the turns is no difference, and a few turns tell nothing.
"""

import argparse
import json
import os
import statistics
from pathlib import Path

import torch
from benchmark import parse_arguments
from transformers.utils import logging
from workload import batches_for, load_pair, say_how_busy

import hf_ssd
from hf_ssd.cli.bench import cores_for
from hf_ssd.cli.methods import PLAIN, SSD, Bench

CASES = {
    "embedded pair, greedy": ["--lookahead", "4", "--budget", "6"],
    "embedded pair, sampled": ["--lookahead", "3", "--budget", "6", "--temperature", "0.8"],
    "embedded pair, planned": [],
    "embedded pair, batch of 4": ["--lookahead", "4", "--budget", "6", "--batch-size", "4"],
    "random pair": ["--layered", "tiny", "--agreement", "0.85", "--lookahead", "4", "--budget", "8"],
}
FEWEST_TURNS = 5  # for a verdict
OPTIONS = ["--max-new-tokens", "96", "--ignore-eos", "--assistant-tokens", "--in-turn-lookaheads", "4"]


def measure(arguments: list[str], repeats: int) -> dict[str, list[float]]:
    """Returns the speed of each of our methods over plain generate(), turn by turn."""
    args = parse_arguments([*OPTIONS, "--repeats", str(repeats), *arguments])
    target, draft, tokenizer = load_pair(args)
    cores = cores_for(args, target, draft)
    with hf_ssd.launch_draft(draft, cores=cores) as assistant:
        bench = Bench(args, target, draft, assistant, batches_for(args, tokenizer, target))
        methods = {name: m for name, m in bench.methods(cores, all_devices=False).items() if "assisted" not in name}
        bench.measure(methods)
    plain = [run.speed for run in methods[PLAIN].runs]
    return {
        name: [run.speed / base for run, base in zip(method.runs, plain)]
        for name, method in methods.items()
        if name.startswith(SSD)
    }


def verdict(before: list[float], now: list[float]) -> tuple[float, str]:
    """Returns the ratio of the medians, and whether it is more than the turns differ among themselves."""
    ratio = statistics.median(now) / statistics.median(before)
    if min(len(before), len(now)) < FEWEST_TURNS:
        return ratio, f"no verdict from fewer than {FEWEST_TURNS} turns"
    middle = [statistics.quantiles(ratios, n=4) for ratios in (before, now)]
    if middle[1][2] < middle[0][0]:
        return ratio, "slower"
    return ratio, "faster" if middle[1][0] > middle[0][2] else "as before"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--keep", type=Path, help="JSON file to write")
    parser.add_argument("--compare", type=Path, help="JSON file of an earlier run on this machine")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="default: all")
    parser.add_argument("--repeats", type=int, default=6, help="turns, at least 2; one more warms up")
    args, load = parser.parse_args(), os.getloadavg()[0]
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    before = json.loads(args.compare.read_text()) if args.compare else {}
    threads, found, is_slower = torch.get_num_threads(), {}, False
    for case in args.cases:
        torch.set_num_threads(threads)
        found[case] = measure(CASES[case], args.repeats)
        for name, ratios in found[case].items():
            line = f"{case:<26} {name:<16} {statistics.median(ratios):5.2f}x plain"
            line += f" ({min(ratios):.2f} to {max(ratios):.2f})"
            if case in before and name in before[case]:
                ratio, words = verdict(before[case][name], ratios)
                is_slower |= words == "slower"
                line += f"   {ratio:5.2f} of before: {words}"
            print(line, flush=True)
    say_how_busy(load, [ratios for of_case in found.values() for ratios in of_case.values()])
    if args.keep:
        args.keep.write_text(json.dumps(found, indent=2) + "\n")
    raise SystemExit(int(is_slower))


if __name__ == "__main__":
    main()
