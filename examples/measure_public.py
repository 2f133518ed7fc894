"""The README's first table: a pair of public models, and every way to generate with it on all cores of this machine.

    python examples/real_models.py ~/.cache/hf_ssd
    python examples/measure_public.py ~/.cache/hf_ssd/qwen-coder-1.5b ~/.cache/hf_ssd/qwen-coder-0.5b

The first lines of real_models.py say which packages it needs. The second command prints the table in Markdown, and
`--output` writes all figures to a file. It measures answers of a chat, functions to write, changes of code and
summaries, and batches of one prompt of each kind; greedily and at temperature 0.7. Methods take turns. Each turn
answers other prompts in all columns, and after `--minutes` no further turn of a column begins, so columns may have
different numbers of turns. A figure is the median over the turns of the speed over plain `generate()`, prompts not
counted. Answers that warm up also decide how many tokens transformers' assisted generation drafts.
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
import torch
from own_texts import as_messages, load_tokenizer
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from workload import say_how_busy

import hf_ssd
from hf_ssd.cli.bench import about
from hf_ssd.cli.methods import ASSISTED, PLAIN, Bench, Method
from hf_ssd.cli.table import row_of
from hf_ssd.distributed.cores import available_cores

BEST = "transformers' assisted generation at its best"
BATCH = "batch of 4"
LOOKUP = "transformers' prompt lookup"
IN_TURN, AHEAD, DEFAULT = "hf_ssd in turn", "hf_ssd ahead, the cores divided", "**hf_ssd**, which plans by itself"


def methods_of(draft, assistant, rows: int) -> dict[str, Method]:
    """Returns the methods for `rows` prompts at once, but for assisted generation. Prompt lookup takes a single one."""
    options = {"pack_weights": True}  # "auto" wants more memory to be free than two drafts leave
    methods = {PLAIN: {}}
    if rows == 1:
        methods[LOOKUP] = {"prompt_lookup_num_tokens": 10}
    methods[IN_TURN] = {"assistant_model": draft, "ssd_config": hf_ssd.SSDConfig(asynchronous=False, **options)}
    methods[AHEAD] = {"assistant_model": assistant, "ssd_config": hf_ssd.SSDConfig(lookahead=4, budget=12, **options)}
    methods[DEFAULT] = {"assistant_model": assistant, "ssd_config": hf_ssd.SSDConfig(**options)}
    return {name: Method(how, None, len(available_cores())) for name, how in methods.items()}


def assisted(draft, tokens: int) -> Method:
    """Returns assisted generation of transformers' with so many drafted tokens in each round."""
    settings = {"num_assistant_tokens": tokens, "num_assistant_tokens_schedule": "constant"}
    settings["assistant_confidence_threshold"] = 0.0
    return Method({"assistant_model": draft}, None, len(available_cores()), settings)


class Column:
    """
    A kind of prompt at a temperature.

    Args:
        args (`argparse.Namespace`): Has `max_new_tokens` and `assistant_tokens`.
        models (`tuple`): Target, draft, its worker and the tokenizers.
        batches (`list[dict]`): Inputs of `generate()`, one for each turn.
        temperature (`float`): 0 is greedy.
    """

    def __init__(self, args, models: tuple, batches: list[dict], temperature: float):
        target, draft, assistant, tokenizers = models
        work = argparse.Namespace(max_new_tokens=args.max_new_tokens, temperature=temperature, ignore_eos=False)
        self.bench = Bench(work, target, draft, assistant, batches, tokenizers)
        self.draft, self.methods = draft, methods_of(draft, assistant, len(batches[0]["input_ids"]))

    @property
    def is_single(self) -> bool:
        return LOOKUP in self.methods

    def turn(self, number: int, show) -> None:
        """Runs each method once. Methods of transformers that fail with this pair are left out."""
        runs = {}
        for name, method in list(self.methods.items()):
            show(name)
            try:
                runs[name] = self.bench.run(method, number)
            except (ValueError, IndexError, AttributeError):
                if name not in (BEST, LOOKUP):
                    raise
                del self.methods[name]
        if all(run.tokens > run.first for run in runs.values()):
            for name, run in runs.items():
                self.methods[name].runs.append(run)

    def best_assisted(self, choices: list[int], show) -> int | None:
        """Runs assisted generation with each number of drafted tokens, and returns the fastest that this pair takes."""
        speeds = {}
        for tokens in choices:
            show(f"{ASSISTED}, {tokens}")
            try:
                speeds[tokens] = self.bench.run(assisted(self.draft, tokens), 0).speed
            except (ValueError, IndexError, AttributeError):
                return None
        return max(speeds, key=speeds.get, default=None)

    def rows(self) -> dict[str, dict]:
        """Returns a row for each method by its name: `over plain`, `lowest`, `highest`, and those of `hf-ssd bench`."""
        rows, plain = {}, self.methods[PLAIN].runs
        for name, method in self.methods.items():
            ratios = [run.speed / base.speed for run, base in zip(method.runs, plain)]
            rows[name] = row_of(name, method, plain) | {"lowest": min(ratios), "highest": max(ratios)}
        return rows


def columns_of(args, models: tuple, tokenizer) -> dict[str, Column]:
    """Returns the columns by their titles: each kind of prompt alone, and batches with a prompt of each kind."""
    texts = {kind: as_messages(of, tokenizer) for kind, of in prompt_kinds.held_out(args.repeats + 1).items()}
    texts = {kind: [[text] for text in of] for kind, of in texts.items() if kind in args.kinds}
    if len(texts) > 1:
        texts[BATCH if len(texts) == 4 else f"batch of {len(texts)}"] = [sum(of, []) for of in zip(*texts.values())]
    options = {"return_tensors": "pt", "return_token_type_ids": False, "padding": True}
    options["add_special_tokens"] = tokenizer.chat_template is None
    columns = {}
    for temperature in args.temperatures:
        for kind, batches in texts.items():
            title = f"{kind}, {f'T = {temperature:g}' if temperature else 'greedy'}"
            columns[title] = Column(args, models, [tokenizer(of, **options) for of in batches], temperature)
    return columns


def measure(args, columns: dict[str, Column]) -> None:
    """
    Runs turns of all columns until `--repeats` or `--minutes` are over. The first column warms up: our methods answer
    twice, so that weights are packed and the pair is known, and assisted generation finds its best.
    """
    end, (first, *_) = time.perf_counter() + 60 * args.minutes, columns.values()
    with tqdm(total=1 + args.repeats * len(columns), desc="measuring", unit="column", disable=None) as bar:
        best = first.best_assisted(args.assistant_tokens, bar.set_postfix_str)
        for name in (IN_TURN, AHEAD, DEFAULT, DEFAULT):
            bar.set_postfix_str(f"warming up: {name}")
            first.bench.run(first.methods[name], 0)
        bar.update()
        for column in columns.values():
            if best and column.is_single:
                rest = {name: method for name, method in column.methods.items() if name != PLAIN}
                column.methods = {PLAIN: column.methods[PLAIN], BEST: assisted(column.draft, best), **rest}
        for turn in range(1, args.repeats + 1):
            for title, column in columns.items():
                if turn > 1 and time.perf_counter() > end:
                    return
                column.turn(turn, lambda name, title=title: bar.set_postfix_str(f"{title}: {name}"))
                bar.update()


def table(columns: dict[str, dict[str, dict]]) -> str:
    """Returns the rows of all columns as a table of Markdown."""
    lines = ["| speed over plain `generate()` | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    for name in dict.fromkeys(name for rows in columns.values() for name in rows if name != PLAIN):
        cells = [rows.get(name) for rows in columns.values()]
        texts = ["" if cell is None else f"{cell['over plain']:.2f}" for cell in cells]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines)


def machine() -> str:
    """Returns the processor's name, the number of cores, and the extensions that speed up bfloat16."""
    lines = open("/proc/cpuinfo").read().split("\n") if os.path.exists("/proc/cpuinfo") else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split()}
    has = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in flags][:1]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}{''.join(f' ({flag})' for flag in has)}, {len(available_cores())} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", metavar="TARGET", help="folder or hub id of the large model")
    parser.add_argument("draft", metavar="DRAFT", help="folder or hub id of the small model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kinds", nargs="+", default=["chat", "code", "edit", "summary"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7])
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2, help="most turns")
    parser.add_argument("--minutes", type=float, default=12.0, help="for all turns but the first")
    parser.add_argument("--assistant-tokens", nargs="*", type=int, default=[3, 6], help="of assisted generation")
    parser.add_argument("--output", type=Path, help="a JSON file for all figures")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    load = os.getloadavg()[0]
    torch.set_num_threads(len(available_cores()))

    # 1. The pair.
    folders = [os.path.expanduser(name) for name in (args.target, args.draft)]
    target, draft = (AutoModelForCausalLM.from_pretrained(name, dtype=args.dtype).eval() for name in folders)
    tokenizer, other = map(load_tokenizer, folders)
    differ = tokenizer.get_vocab() != other.get_vocab()
    tokenizers = {"tokenizer": tokenizer, "assistant_tokenizer": other} if differ else {}

    # 2. Each kind of text at each temperature.
    with hf_ssd.launch_draft(folders[1], dtype=args.dtype) as assistant:
        columns = columns_of(args, (hf_ssd.enable(target), draft, assistant, tokenizers), tokenizer)
        measure(args, columns)
    found = {title: column.rows() for title, column in columns.items() if column.methods[PLAIN].runs}

    # 3. The table.
    print(table(found))
    plain = statistics.median(rows[PLAIN]["speed"] for title, rows in found.items() if not title.startswith("batch"))
    turns = [len(column.methods[PLAIN].runs) for column in columns.values()]
    print(f"\n{machine()}; plain generate(): {plain:.2f} tokens/s for one prompt; {args.dtype}, {args.max_new_tokens} "
          f"tokens, {min(turns)} to {max(turns)} turns")  # fmt: skip
    for title, rows in found.items():
        if title.endswith("greedy") and not all(row["same tokens"] for row in rows.values()):
            others = ", ".join(name for name, row in rows.items() if not row["same tokens"])
            print(f"Other tokens than those of plain generate() in {title}: {others}", file=sys.stderr)
    say_how_busy(load, [[row["lowest"], row["highest"]] for rows in found.values() for row in rows.values()])
    if args.output:
        args.output.write_text(json.dumps({"columns": found, "processor": machine(), **about()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
