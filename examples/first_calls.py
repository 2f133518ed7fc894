"""Is it good at once? The first three calls of a process with SSDConfig(), beside plain and assisted generation.

    python examples/first_calls.py
    python examples/first_calls.py --agreements 0.9 --processes 3 --dtype bfloat16
    python examples/first_calls.py --pair folder --processes 2

Each process is a new one, knows nothing of the pair, and has a worker that is ready. It makes three calls with each
method, one after the other with the same prompt and on all cores. The speeds of the three calls together are
compared, and the medians of the processes printed. Eight plain tokens come before, because whoever comes first pays
for what torch does once. With `--pair`, a folder with the folders `target` and `draft`, prompts are questions and
tasks that `prompt_kinds.py` holds out; models that are made here get random tokens.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import prompt_kinds
import torch
from layered_pair import SIZES, layered_pair
from own_texts import as_messages, load_tokenizer
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import hf_ssd

CALLS, PROMPT_LENGTH, ASSISTANT_TOKENS = 3, 32, (3, 5, 8)
LONGEST = 3600  # seconds of a process


def has_matrix_units() -> bool:
    """Whether the processor multiplies matrices of bfloat16 in hardware (Intel AMX)."""
    cpu = Path("/proc/cpuinfo")
    return cpu.exists() and "amx_bf16" in cpu.read_text()


def random_prompts(target, seed: int) -> torch.LongTensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, target.config.vocab_size, (CALLS, 1, PROMPT_LENGTH), generator=generator)


def real_prompts(folder: Path, seed: int) -> list[torch.LongTensor]:
    tokenizer = load_tokenizer(str(folder))
    texts = [of[seed] for of in prompt_kinds.held_out(seed + 1).values()][:CALLS]
    return [tokenizer(text, return_tensors="pt").input_ids for text in as_messages(texts, tokenizer)]


def measure(folder: Path, dtype: str, is_real: bool, new_tokens: int, seed: int) -> dict:
    """Returns the seconds of each call of each method in this process, and what the last SSD call said."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=dtype).eval() for name in ("target", "draft")
    )
    hf_ssd.enable(target)
    prompts = real_prompts(folder / "target", seed) if is_real else random_prompts(target, seed)
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    seconds, reasons = {}, []
    with hf_ssd.launch_draft(draft) as assistant:
        methods = {"SSD": {"assistant_model": assistant, "ssd_config": hf_ssd.SSDConfig()}, "plain": {}}
        methods |= {f"assisted, K = {k}": {"assistant_model": draft, "k": k} for k in ASSISTANT_TOKENS}
        target.generate(prompts[0], attention_mask=torch.ones_like(prompts[0]), max_new_tokens=8, do_sample=False)
        for prompt in prompts:
            for name, method in methods.items():
                arguments = dict(method)
                if "k" in arguments:
                    draft.generation_config.num_assistant_tokens = arguments.pop("k")
                    draft.generation_config.num_assistant_tokens_schedule = "constant"
                    draft.generation_config.assistant_confidence_threshold = 0.0
                arguments |= {"attention_mask": torch.ones_like(prompt), "return_dict_in_generate": True, **options}
                start = time.perf_counter()
                output = target.generate(prompt, **arguments)
                seconds.setdefault(name, []).append(time.perf_counter() - start)
                if name == "SSD":
                    reasons.append(output.ssd_stats.reason)
    return {"seconds": seconds, "reasons": reasons}


def compare(runs: list[dict]) -> dict[str, float]:
    """Returns the speed of SSD over plain and over the best assisted generation, medians of the processes."""
    totals = [{name: sum(calls) for name, calls in run["seconds"].items()} for run in runs]
    best = min(
        (name for name in totals[0] if name.startswith("assisted")), key=lambda name: sum(t[name] for t in totals)
    )
    return {
        "over plain": statistics.median(total["plain"] / total["SSD"] for total in totals),
        f"over {best}": statistics.median(total[best] / total["SSD"] for total in totals),
    }


def processes(folder: str, said: str, dtype: str, args) -> dict:
    """Measures a pair in some processes, and says what came out. Returns the figures."""
    command = [sys.executable, __file__, "--child", folder, "--max-new-tokens", str(args.max_new_tokens)]
    command += ["--dtype", dtype, *(["--pair", folder] if args.pair else [])]
    runs = []
    for process in tqdm(range(args.processes), desc=said, unit="process"):
        seeded = [*command, "--seed", str(args.seed + process)]
        done = subprocess.run(seeded, capture_output=True, text=True, check=True, timeout=LONGEST)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    ratios = compare(runs)
    shown = ", ".join(f"{ratio:.3f} {name}" for name, ratio in ratios.items())
    print(f"{said} in {dtype}: SSD is {shown}; {runs[0]['reasons'][-1]}", flush=True)
    return {"ratios": ratios, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pair", type=Path, metavar="FOLDER", help="in place of pairs that are made here")
    parser.add_argument("--size", choices=SIZES, default="287m/39m")
    parser.add_argument("--agreements", type=float, nargs="+", default=[0.93, 0.65, 0.1])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 with matrix units")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts of the first process")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if args.child:
        print(json.dumps(measure(args.child, args.dtype, args.pair is not None, args.max_new_tokens, args.seed)))
        return
    dtype = args.dtype or ("bfloat16" if has_matrix_units() else "float32")
    figures = {}
    if args.pair:
        figures[args.pair.name] = processes(str(args.pair), args.pair.name, dtype, args)
    for agreement in () if args.pair else args.agreements:
        with tempfile.TemporaryDirectory() as folder:
            target, draft = layered_pair(args.size, agreement, dtype=getattr(torch, dtype))
            for name, model in (("target", target), ("draft", draft)):
                model.save_pretrained(Path(folder) / name)
            acceptance = target.config.acceptance_rate
            del target, draft
            found = processes(folder, f"{args.size}, acceptance {acceptance:.2f}", dtype, args)
        figures[agreement] = {"acceptance": acceptance, **found}
    if args.output:
        args.output.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
