"""Is the planner right? Measures fixed settings side by side with SSDConfig(), which plans by itself.

    python examples/sweep.py --max-new-tokens 192 --repeats 5
    python examples/sweep.py --target folder/target --draft folder/draft --dtype bfloat16 --temperature 1 --batch-size 8

The target has the same device in all rows, SSD has one more for the draft. All settings are run in turn, again and
again, and each is compared with the planner within one turn: what else the machine does falls on all of them alike. The
order is another one in each turn, because a core is slower for a while after it had nothing to do: who always came
after plain decoding would have a draft that has slept.

Of a dozen settings that are equally good, one looks better than the others by chance: just then the machine was
quicker, or this text has its surprises where that setting's speculations end. So each turn has another text, as far as
there are prompts; and the best settings are picked in some turns, and the planner compared with them in others, which
are more, as there is less to measure. Drafting in turn in the target's own process, where no message has to travel, is
measured too; it is another way to run, and not a setting that the planner could pick.
"""

import argparse
import contextlib
import json
import math
import random
import statistics
import time
from pathlib import Path

from tqdm.auto import tqdm
from transformers import set_seed
from transformers.utils import logging
from workload import add_pair_and_work, batches_for, load_pair

import hf_ssd
from hf_ssd.cli.methods import sampling
from hf_ssd.distributed.cores import use_cores

PLAIN, AUTO, OWN_PROCESS = "plain generate", "planned", ", here"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_pair_and_work(parser)
    parser.add_argument("--warm-up", type=int, default=1, help="first turns, in which the planner learns")
    parser.add_argument("--repeats", type=int, default=4, help="turns of all settings, which pick the best ones")
    parser.add_argument("--comparisons", type=int, default=12, help="turns of the planner and those")
    parser.add_argument("--finalists", type=int, default=2, help="how many are the best ones")
    parser.add_argument("--lookaheads", type=int, nargs="+", default=[2, 3, 4, 6])
    parser.add_argument("--budgets", type=int, nargs="+", default=[4, 12])
    parser.add_argument("--output", help="JSON file for the figures")
    args = parser.parse_args()
    if args.repeats < 1 or args.finalists < 1:
        parser.error("--repeats and --finalists must be at least 1: without turns that pick settings there are none")
    if args.comparisons < 2:
        parser.error("--comparisons must be at least 2: one turn does not tell how much turns differ")
    if args.warm_up < 1:
        parser.error("--warm-up must be at least 1: the first turn of all is slow for reasons of its own")
    return args


def settings_of(args) -> dict[str, dict | None]:
    """Settings by name; `None` is plain generate()."""
    fixed = {f"lookahead {k}, budget {b}": {"lookahead": k, "budget": b} for k in args.lookaheads for b in args.budgets}
    in_turn = {f"lookahead {k}, in turn": {"lookahead": k, "asynchronous": False} for k in args.lookaheads}
    here = {f"{name}{OWN_PROCESS}": setting for name, setting in in_turn.items()}
    return {PLAIN: None, AUTO: {}, **fixed, **in_turn, **here}


def order_of(settings: dict[str, dict | None], turn: int) -> list[tuple[str, dict | None]]:
    """The settings in an order of this turn's own."""
    return random.Random(turn).sample(list(settings.items()), len(settings))


def measure(args, target, draft, assistant, batches, settings, turns: range) -> dict[str, list[dict]]:
    """Returns what each setting did in each turn but the first ones of all, which warm up."""
    options = {"max_new_tokens": args.max_new_tokens, "min_new_tokens": args.max_new_tokens}
    options |= {"return_dict_in_generate": True, **sampling(args.temperature)}
    runs = {name: [] for name in settings}
    for turn in tqdm(turns, desc="measuring", unit="turn"):
        inputs = batches[turn % len(batches)]
        for name, chosen in order_of(settings, turn):
            set_seed(turn)
            method = {}
            if chosen is not None:
                model = draft if name.endswith(OWN_PROCESS) else assistant
                method = {"assistant_model": model, "ssd_config": hf_ssd.SSDConfig(**chosen)}
            cores = use_cores(assistant.cores.target) if assistant.cores else contextlib.nullcontext()
            with cores:
                start = time.perf_counter()
                output = target.generate(**inputs, **options, **method)
                seconds = time.perf_counter() - start
            if turn >= args.warm_up:
                stats = getattr(output, "ssd_stats", None)
                figures = stats.to_dict() if stats else {}
                kept = ("tokens_per_round", "hit_rate", "acceptance_rate", "wait_share")
                speed = args.max_new_tokens * args.batch_size / seconds
                runs[name].append({"speed": speed, **{key: figures.get(key) for key in kept}})
    return runs


def over_planned(runs: dict[str, list[dict]], name: str) -> list[float]:
    """Returns a setting's speed over the planner's, for each turn, as logarithms."""
    return [math.log(run["speed"] / auto["speed"]) for run, auto in zip(runs[name], runs[AUTO], strict=True)]


def best_of(runs: dict[str, list[dict]], names: list[str], count: int) -> list[str]:
    """Returns the fastest settings, the best one first."""
    return sorted(names, key=lambda name: -statistics.fmean(over_planned(runs, name)))[:count]


def share_of(runs: dict[str, list[dict]], name: str) -> tuple[float, float]:
    """Returns the planner's speed over that of a setting: geometric mean of the turns, and its standard error."""
    ratios = over_planned(runs, name)
    share = math.exp(-statistics.fmean(ratios))
    return share, share * statistics.stdev(ratios) / len(ratios) ** 0.5


def table(runs: dict[str, list[dict]]) -> list[dict]:
    """Returns a row for each setting, best first: its speed over the planner's within one turn, and medians."""
    rows = []
    for name in best_of(runs, list(runs), len(runs)):
        measured = runs[name]
        medians = {
            key: statistics.median(run[key] for run in measured) for key in measured[0] if measured[0][key] is not None
        }
        rows.append({"setting": name, "over_planned": math.exp(statistics.fmean(over_planned(runs, name))), **medians})
    return rows


def main() -> None:
    args = parse_arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target, draft, tokenizer = load_pair(args)
    batches = batches_for(args, tokenizer, target)
    settings = settings_of(args)
    here = [name for name in settings if name.endswith(OWN_PROCESS)]
    with hf_ssd.launch_draft(draft) as assistant:
        start = args.warm_up + args.repeats
        runs = measure(args, target, draft, assistant, batches, settings, range(start))
        best = best_of(runs, [name for name in settings if name != AUTO and name not in here], args.finalists)
        best_here = best_of(runs, here, 1)
        chosen = {name: settings[name] for name in (AUTO, *dict.fromkeys([PLAIN, *best, *best_here]))}
        turns = range(start, start + args.comparisons)
        compared = measure(args, target, draft, assistant, batches, chosen, turns)
    rows = table(runs)
    print(f"temperature {args.temperature:g}, batch size {args.batch_size}, {args.max_new_tokens} new tokens")
    print(f"{'setting':<26} {'over planned':>12} {'tokens/s':>9} {'tokens/round':>13} {'hit rate':>9} {'wait':>6}")
    for row in rows:
        figures = (row.get("tokens_per_round"), row.get("hit_rate"), row.get("wait_share"))
        texts = ["" if x is None else f"{x:.2f}" for x in figures]
        print(
            f"{row['setting']:<26} {row['over_planned']:>12.3f} {row['speed']:>9.1f} "
            f"{texts[0]:>13} {texts[1]:>9} {texts[2]:>6}"
        )
    print(f"the {len(best)} best of these {args.repeats} turns, compared in {args.comparisons} others:")
    comparison = []
    for name in list(chosen)[1:]:
        share, error = share_of(compared, name)
        comparison.append({"setting": name, "share": share, "error": error, "is_finalist": name in best})
        what = "" if name in best else " (the best of its kind)" if name in best_here else " (not one of them)"
        print(f"the planner reaches {share:.3f} +- {error:.3f} of {name}{what}")
    if args.output:
        figures = {"arguments": vars(args), "rows": rows, "comparison": comparison}
        Path(args.output).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
