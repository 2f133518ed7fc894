"""What is measured: a pair of models and prompts. For the programs that measure speed."""

import argparse
import os
from pathlib import Path

import torch
from evaluation.prompts import check_file, load_samples
from layered_pair import SIZES, layered_pair
from transformers import AutoModelForCausalLM

import hf_ssd
from hf_ssd import devices
from hf_ssd.cli import prompts as texts
from hf_ssd.cli.bench import add_work
from hf_ssd.cli.models import Model
from hf_ssd.cli.pair import folder
from hf_ssd.drafting.heads.loading import head_for

PAIR = Path(folder("target")).parent
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
    add_work(parser)


def load_pair(args):
    """Returns target and draft, on the first and the last accelerator or on the CPU, and the tokenizer, if any."""
    dtype, places = getattr(torch, args.dtype), devices.accelerators() or [torch.device("cpu")]
    tokenizer = None
    if args.layered:
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
        target, draft = layered_pair(args.layered, args.agreement, args.temperature, dtype, device=places[0])
        print(f"{args.layered}: acceptance {target.config.acceptance_rate:.3f} (asked for {args.agreement})")
    else:
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).eval()
        draft = head_for(args.draft, target, dtype)
        if draft is None:
            draft = AutoModelForCausalLM.from_pretrained(args.draft, dtype=dtype).eval()
        tokenizer = Model(args.target).tokenizer
    target, draft = target.to(places[0]), draft.to(places[-1])
    if args.compile:
        target.compile(dynamic=True)
        draft.compile(dynamic=True)
    return hf_ssd.enable(target), draft, tokenizer


def batches_for(args, tokenizer, target) -> list[dict]:
    """Returns prompts in batches: the user's, snippets of Python, or random tokens where there is no tokenizer."""
    prompts, size = texts.SNIPPETS, args.batch_size
    if tokenizer is not None and args.prompts:
        count = max(size, args.repeats + 1)
        if check_file(args.prompts):
            samples = load_samples(args.prompts, args.prompt_field, count, fits=lambda prompt: True)
            prompts = [sample.prompt for sample in samples]
        else:
            from datasets import load_dataset

            prompts = next(iter(load_dataset(args.prompts).values()))[args.prompt_field][:count]
    return texts.batches_for(target, tokenizer, prompts, size, args.prompt_length)


def is_busy(load: float) -> bool:
    """Whether so many programs want to run that figures may not hold."""
    return load > BUSY * os.cpu_count()


def say_how_busy(load: float, turns: list[list[float]]) -> None:
    """
    Prints how steady the figures are, with a warning if they are too unsteady to be compared.

    Args:
        load (`float`): `os.getloadavg()[0]` before anything was measured; later it counts what is measured too.
        turns (`list[list[float]]`): For each method its speed over plain generate(), turn by turn.
    """
    cores, widest = os.cpu_count(), max(max(ratios) / min(ratios) for ratios in turns)
    print(f"Load before: {load:.1f} on {cores} cores. The turns of a method differ by up to {widest - 1:.0%}.")
    if is_busy(load) or widest > UNSTEADY:
        print("WARNING: the machine is busy or unsteady, so these figures may not hold; measure again on a quiet one.")
