"""How fast is another engine with the same two models? hf_ssd and transformers beside openvino-genai, on the CPU.

python examples/compare_engines.py
python examples/compare_engines.py --layered 287m/39m --agreement 0.85 --new-tokens 64

The other engine gets an environment of its own below --environments, about 2 GB, and both models in its own format.
Greedy, float32, batch size 1, the same prompt and the same number of tokens; methods and engines take turns. Speeds
count the prompt too.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers.utils import logging
from workload import PAIR, add_pair_and_work, batches_for, load_pair

import hf_ssd
from hf_ssd.cli.bench import cores_for
from hf_ssd.cli.methods import ASSISTED, PLAIN, SSD, Bench

ENGINE = "openvino-genai"
PINNED = ["torch==2.13.0", "optimum-intel==2.2.0", "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0"]
PINNED += ["openvino-genai==2026.4.1.0"]
RUNS = Path(__file__).parent / "engines" / "openvino_genai_runs.py"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_pair_and_work(parser)
    parser.add_argument("--lookaheads", type=int, nargs="+", default=[3, 5, 8], help="of all that draft, but SSD")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--environments", type=Path, default=Path("engines"), help="where the other engine is installed"
    )
    args = parser.parse_args(arguments)
    if args.temperature or args.batch_size != 1 or args.dtype != "float32":
        parser.error("engines are compared greedily, in float32, with one row")
    args.repeats, args.assistant_tokens, args.in_turn_lookaheads, args.pin = args.turns, args.lookaheads, [], None
    args.lookahead = args.budget = None
    args.ignore_eos = True
    return args


def installed(folder: Path) -> Path:
    """Installs the other engine, unless it is there, and returns the folder of its programs."""
    programs = folder / ENGINE / "bin"
    done = folder / ENGINE / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / ENGINE)], check=True)
        subprocess.run([str(programs / "pip"), "install", "--quiet", *PINNED], check=True)
        # Not needed, and it does not load beside every build of torch.
        subprocess.run([str(programs / "pip"), "uninstall", "--quiet", "--yes", "torchvision"], check=True)
        done.write_text("\n".join(PINNED) + "\n")
    return programs


def export(programs: Path, model, source: str, folder: Path) -> str:
    """Writes a model in the other engine's format, unless it is there, with the embedded tokenizer if it has none."""
    if not (folder / "openvino_detokenizer.xml").exists():
        model.save_pretrained(folder / "source")
        command = ["export", "openvino", "--model", str(folder / "source"), "--weight-format", "fp32"]
        command += ["--task", "text-generation-with-past", "--disable-convert-tokenizer", str(folder)]
        subprocess.run([str(programs / "optimum-cli"), *command], check=True, capture_output=True)
        has_one = (Path(source) / "tokenizer.json").exists()
        tokenizer = source if has_one else str(PAIR / "target")  # prompts are tokens: it is only asked to be there
        command = [str(programs / "convert_tokenizer"), tokenizer, "--with-detokenizer", "-o", str(folder)]
        subprocess.run(command, check=True, capture_output=True)
    return str(folder)


def measure_engine(programs: Path, folders: dict[str, str], inputs: dict, args, threads: int) -> dict:
    """Returns figures by method, see `engines/openvino_genai_runs.py`."""
    job = {**folders, "threads": threads, "lookaheads": args.lookaheads, "new_tokens": args.new_tokens}
    job["prompt"] = inputs["input_ids"][0].tolist()
    command = [str(programs / "python"), str(RUNS)]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=True, timeout=600)
    return json.loads(done.stdout.strip().splitlines()[-1])


def rows_of(speeds: dict[str, list[float]], plain: str) -> list[tuple[str, float, float]]:
    """Returns name, median speed and median ratio to `plain` in the same turn; of settings, the best one."""
    rows = {}
    for name, values in speeds.items():
        ratio = statistics.median(one / base for one, base in zip(values, speeds[plain]))
        family = name.rpartition(", ")[0] if name[-1].isdigit() else name
        if family not in rows or ratio > rows[family][2]:
            rows[family] = (name, statistics.median(values), ratio)
    return list(rows.values())


def as_table(rows: list[tuple[str, float, float]]) -> str:
    lines = ["| | tokens/s | over transformers' plain `generate()` |", "| --- | --- | --- |"]
    return "\n".join(lines + [f"| {name} | {speed:.0f} | {ratio:.2f} |" for name, speed, ratio in rows])


def main() -> None:
    args = parse_arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    programs = installed(args.environments)
    target, draft, tokenizer = load_pair(args)
    inputs = batches_for(args, tokenizer, target)[0]
    name = (args.layered or "pair").replace("/", "_") + (f"_{args.agreement}" if args.layered else "")
    folders = {
        side: export(programs, model, getattr(args, side), args.environments / name / side)
        for side, model in (("target", target), ("draft", draft))
    }
    cores, speeds = cores_for(args, target, draft), {}
    torch.set_num_threads(len(cores.target))
    with hf_ssd.launch_draft(draft, cores=cores) as assistant:
        bench = Bench(args, target, draft, assistant, [inputs])
        methods = bench.methods(cores, all_devices=False)
        del methods[f"{ASSISTED}, default"]
        for turn in tqdm(range(args.turns + 2), desc="measuring", unit="turn", disable=None):
            found = {}
            for method_name, method in methods.items():
                start = time.perf_counter()
                run = bench.run(method, turn)
                ours = "hf_ssd" if method_name == SSD else "transformers"
                found[f"{ours}: {method_name}"] = run.tokens / (time.perf_counter() - start)
            for threads in sorted({len(cores.target), len(cores.target) + len(cores.drafts[0])}):
                figures = measure_engine(programs, folders, inputs, args, threads)
                found |= {f"{ENGINE} on {threads} cores: {way}": one["speed"] for way, one in figures.items()}
            if turn > 1:  # the planner gets to know the pair
                for way, speed in found.items():
                    speeds.setdefault(way, []).append(speed)
    print(as_table(rows_of(speeds, f"transformers: {PLAIN}")))


if __name__ == "__main__":
    main()
