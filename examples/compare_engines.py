"""How fast is another engine with the same two models? hf_ssd and transformers beside openvino-genai, on the CPU.

python examples/compare_engines.py
python examples/compare_engines.py --layered 287m/39m --agreement 0.85 --max-new-tokens 64

The other engine gets an environment of its own below --environments, about 2 GB, and both models in its own format.
Greedy, float32, batch size 1, the same prompt and the same number of tokens; methods and engines take turns, on the
cores of the target and on those of target and draft together. Speeds count the prompt too. Tokens that differ from
those of plain `generate()` are reported: float32 sums in another order may turn the choice between two close logits.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tqdm.auto import tqdm
from transformers.utils import logging
from workload import PAIR, add_pair_and_work, batches_for, load_pair

import hf_ssd
from hf_ssd.cli.bench import cores_for
from hf_ssd.cli.methods import ASSISTED, PLAIN, SSD, Bench, Method
from hf_ssd.distributed.cores import CoreShare

ENGINE = "openvino-genai"
PINNED = ["torch==2.13.0", "optimum-intel==2.2.0", "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0"]
PINNED += ["openvino-genai==2026.4.1.0"]
PATIENCE = 1800  # seconds for a step of an installation or an export
WARM_UP = 2  # turns in which the planner gets to know the pair
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


def run(*command, is_quiet: bool = False) -> None:
    subprocess.run([str(word) for word in command], check=True, timeout=PATIENCE, capture_output=is_quiet)


def installed(folder: Path) -> Path:
    """Installs the other engine, unless it is there, and returns the folder of its programs."""
    programs = folder / ENGINE / "bin"
    done = folder / ENGINE / "installed"
    if not done.exists():
        run(sys.executable, "-m", "venv", folder / ENGINE)
        run(programs / "pip", "install", "--quiet", *PINNED)
        # Not needed, and it does not load beside every build of torch.
        run(programs / "pip", "uninstall", "--quiet", "--yes", "torchvision")
        done.write_text("\n".join(PINNED) + "\n")
    return programs


def export(programs: Path, model, source: str, folder: Path) -> str:
    """Writes a model in the other engine's format, unless it is there, with the embedded tokenizer if it has none."""
    if not (folder / "openvino_detokenizer.xml").exists():
        model.save_pretrained(folder / "source")
        task = ["--task", "text-generation-with-past", "--weight-format", "fp32", "--disable-convert-tokenizer"]
        run(programs / "optimum-cli", "export", "openvino", "--model", folder / "source", *task, folder, is_quiet=True)
        has_one = (Path(source) / "tokenizer.json").exists()
        tokenizer = source if has_one else PAIR / "target"  # prompts are tokens: it is only asked to be there
        run(programs / "convert_tokenizer", tokenizer, "--with-detokenizer", "-o", folder, is_quiet=True)
    return str(folder)


def measure_engine(programs: Path, folders: dict[str, str], inputs: dict, args, threads: int) -> dict:
    """Returns speed and tokens by method, see `engines/openvino_genai_runs.py`."""
    job = {**folders, "threads": threads, "lookaheads": args.lookaheads, "new_tokens": args.max_new_tokens}
    job["prompt"] = inputs["input_ids"][0].tolist()
    command = [str(programs / "python"), str(RUNS)]
    done = subprocess.run(command, input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    return json.loads(done.stdout.strip().splitlines()[-1])


def counts(cores: CoreShare) -> list[int]:
    """Returns the numbers of cores to compare on: the target's, and those of both."""
    return sorted({len(cores.target), len({*cores.target, *cores.drafts[0]})})


def cores_text(count: int) -> str:
    return f"{count} core" + "s" * (count > 1)


def methods_of(bench: Bench, cores: CoreShare) -> dict[str, Method]:
    """Returns transformers' methods on each number of cores, and SSD, which has those of both."""
    methods = {}
    for all_devices in (False, True):
        for name, method in bench.methods(cores, all_devices).items():
            ours = name == SSD
            if name != f"{ASSISTED}, default":
                methods.setdefault(
                    f"{'hf_ssd' if ours else 'transformers'}, {cores_text(method.devices)}: {name}", method
                )
    return methods


def rows_of(speeds: dict[str, list[float]], plain: str) -> list[tuple[str, float, float, float]]:
    """
    Returns name, median speed, and median ratios in the same turn to the same engine's plain decoding on as many cores
    and to `plain`. Of one method's lookaheads, the best is left. Names are "engine, cores: method" and end with the
    lookahead, if there is one.
    """

    def ratio(values: list[float], base: str) -> float:
        return statistics.median(one / other for one, other in zip(values, speeds[base]))

    rows = {}
    for name, values in speeds.items():
        own = f"{name.partition(': ')[0]}: {PLAIN}"
        own = own if own in speeds else plain  # hf_ssd decodes plainly as transformers does
        family = name.rpartition(", ")[0] if name[-1].isdigit() else name
        row = (name, statistics.median(values), ratio(values, own), ratio(values, plain))
        if family not in rows or row[-1] > rows[family][-1]:
            rows[family] = row
    return list(rows.values())


def as_table(rows: list[tuple[str, float, float, float]]) -> str:
    lines = ["| | tokens/s | over its own plain decoding | over the first row |", "| --- | --- | --- | --- |"]
    return "\n".join(
        lines + [f"| {name} | {speed:.0f} | {own:.2f} | {ratio:.2f} |" for name, speed, own, ratio in rows]
    )


def agreeing(tokens: list[int], expected: list[int]) -> int:
    """Returns how many tokens are equal before the first difference."""
    return next(
        (i for i, pair in enumerate(zip(tokens, expected)) if pair[0] != pair[1]), min(map(len, (tokens, expected)))
    )


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
    cores, speeds, outputs = cores_for(args, target, draft), {}, {}
    with hf_ssd.launch_draft(draft, cores=cores) as assistant:
        bench = Bench(args, target, draft, assistant, [inputs])
        methods = methods_of(bench, cores)
        for turn in tqdm(range(args.turns + WARM_UP), desc="measuring", unit="turn", disable=None):
            for way, method in methods.items():
                start = time.perf_counter()
                run = bench.run(method, turn)
                speed = run.tokens / (time.perf_counter() - start)
                if turn >= WARM_UP:
                    speeds.setdefault(way, []).append(speed)
                    outputs[way] = run.sequences[0, inputs["input_ids"].shape[1] :].tolist()
            for threads in counts(cores) if turn >= WARM_UP else ():
                for way, one in measure_engine(programs, folders, inputs, args, threads).items():
                    way = f"{ENGINE}, {cores_text(threads)}: {way}"
                    speeds.setdefault(way, []).append(one["speed"])
                    outputs[way] = one["tokens"]
    plain = next(iter(speeds))
    print(as_table(rows_of(speeds, plain)))
    for way, tokens in outputs.items():
        if tokens != outputs[plain]:
            equal = agreeing(tokens, outputs[plain])
            print(f"{way}: {equal} of {len(outputs[plain])} tokens equal before the first other")


if __name__ == "__main__":
    main()
