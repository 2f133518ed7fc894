"""What is measured: a pair of models, prompts, and the machine. For the programs that measure speed."""

import argparse
import os
import platform
from pathlib import Path

import torch
import transformers
from evaluation.prompts import check_file, load_samples
from layered_pair import SIZES, layered_pair
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_ssd
from hf_ssd import devices
from hf_ssd.distributed.cores import CoreShare, divide_cores

PAIR = Path(__file__).parent / "pair"
SNIPPETS = [
    "class Reader:\n    def __init__(self, path):\n",
    "import os\n\ndef main(",
    "def parse(self, line):\n    ",
    "for i in range(10):\n",
    "try:\n    value = ",
    "class Error(Exception):\n",
    "def test_",
    "if __name__ == ",
]


BUSY = 0.25  # programs that want to run, for each core, before anything is measured
UNSTEADY = 1.25  # highest over lowest ratio in the turns of one method


def add_models(parser: argparse.ArgumentParser):
    """Adds the arguments that name the models, and returns their group."""
    pair = parser.add_argument_group("models")
    pair.add_argument("--target", default=str(PAIR / "target"), help="hub id or folder of the large model")
    pair.add_argument("--draft", default=str(PAIR / "draft"), help="hub id or folder of the small model")
    pair.add_argument("--dtype", default="bfloat16" if torch.accelerator.is_available() else "float32")
    return pair


def add_pair_and_work(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that [`load_pair`] and [`batches_for`] read."""
    pair = add_models(parser)
    pair.add_argument("--layered", choices=SIZES, help="a random pair of this size instead, see layered_pair.py")
    pair.add_argument("--agreement", type=float, default=0.85, help="acceptance rate of the random pair")
    pair.add_argument("--compile", action="store_true", help="both models by torch.compile, for all methods")
    work = parser.add_argument_group("work")
    work.add_argument("--prompts", help="JSON lines, or a hub dataset; default: snippets of Python, or random tokens")
    work.add_argument("--prompt-field", default="prompt")
    work.add_argument("--prompt-length", type=int, default=32, help="of random tokens")
    work.add_argument("--batch-size", type=int, default=1)
    work.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    work.add_argument("--new-tokens", type=int, default=128)
    work.add_argument("--ignore-eos", action="store_true", help="go on behind the end of the text")


def load_pair(args):
    """Returns target and draft, on the first and the last accelerator or on the CPU, and the tokenizer, if any."""
    dtype, places = getattr(torch, args.dtype), devices.accelerators() or [torch.device("cpu")]
    tokenizer = None
    if args.layered:
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
        target, draft = layered_pair(args.layered, args.agreement, args.temperature, dtype, device=places[0])
        print(f"{args.layered}: acceptance {target.config.acceptance_rate:.3f} (asked for {args.agreement})")
    else:
        target, draft = (
            AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval() for name in (args.target, args.draft)
        )
        tokenizer = load_tokenizer(args.target)
    target, draft = target.to(places[0]), draft.to(places[-1])
    if args.compile:
        target.compile(dynamic=True)
        draft.compile(dynamic=True)
    return hf_ssd.enable(target), draft, tokenizer


def load_tokenizer(name: str):
    """Returns a tokenizer that pads on the left, or `None` for a random model, which has none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    except (OSError, ValueError):
        return None
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def batches_for(args, tokenizer, target) -> list[dict]:
    """Returns prompts in batches: the user's, snippets of Python, or random tokens where there is no tokenizer."""
    if tokenizer is None:
        shape = (4, args.batch_size, args.prompt_length)
        tokens = torch.randint(1, target.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))
        tokens = tokens.to(target.device)
        return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in tokens]
    prompts, size = SNIPPETS, args.batch_size
    if args.prompts:
        count = max(size, args.repeats + 1)
        if check_file(args.prompts):
            samples = load_samples(args.prompts, args.prompt_field, count, fits=lambda prompt: True)
            prompts = [sample.prompt for sample in samples]
        else:
            from datasets import load_dataset

            prompts = next(iter(load_dataset(args.prompts).values()))[args.prompt_field][:count]
    batches = []
    for start in range(0, len(prompts), size):
        batch = [prompts[i % len(prompts)] for i in range(start, start + size)]
        inputs = tokenizer(batch, padding=True, return_tensors="pt", return_token_type_ids=False)
        batches.append(inputs.to(target.device))
    return batches


def sampling(temperature: float) -> dict:
    """Returns options of generate(): greedy at 0, otherwise the temperature alone, without the model's own filters."""
    if not temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def synchronize(device: torch.device) -> None:
    """Waits until an accelerator has done what was launched on it. A CPU does so at once."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def cores_for(args, target, draft) -> CoreShare | None:
    if args.pin:
        sides = [tuple(int(core) for core in side.split(",")) for side in args.pin]
        return CoreShare(sides[0], (sides[1],))
    return divide_cores() if target.device.type == draft.device.type == "cpu" else None


def say_how_busy(load: float, turns: list[list[float]]) -> None:
    """
    Prints how steady the figures are, with a warning if they are too unsteady to be compared.

    Args:
        load (`float`): `os.getloadavg()[0]` before anything was measured; later it counts what is measured too.
        turns (`list[list[float]]`): For each method its speed over plain generate(), turn by turn.
    """
    cores, widest = os.cpu_count(), max(max(ratios) / min(ratios) for ratios in turns)
    print(f"Load before: {load:.1f} on {cores} cores. The turns of a method differ by up to {widest - 1:.0%}.")
    if load > BUSY * cores or widest > UNSTEADY:
        print("WARNING: the machine is busy or unsteady, so these figures may not hold; measure again on a quiet one.")


def about() -> dict:
    """Returns what the figures were made with."""
    versions = {module.__name__: module.__version__ for module in (hf_ssd, torch, transformers)}
    gpus = [devices.name(device) for device in devices.accelerators()]
    return {
        "versions": {**versions, "python": platform.python_version()},
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "gpus": gpus},
    }
