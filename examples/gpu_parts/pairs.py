"""The pairs that are measured, on their devices."""

import argparse
import contextlib
import gc
from dataclasses import dataclass, field

import torch
from layered_pair import Size
from workload import batches_for, load_pair

import hf_ssd

from .devices import Layout

SIZES = {name: name for name in ("1089m/120m", "7852m/520m")}
# Compiling takes as long as there are layers, and a dry run is to be short.
TINY = {"tiny": Size(hidden=64, layers=2, draft_layers=1, intermediate=176, heads=4, kv_heads=2, vocab=512)}
AGREEMENT = 0.85  # of one drafted token


@dataclass
class Pair:
    """
    Args:
        name (`str`): As the report calls it.
        target, draft (`PreTrainedModel`): Both on the target's device.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): A layered pair has none.
        place (`torch.device`): Of the draft worker.
        prompts (`argparse.Namespace`): What [`~workload.batches_for`] needs, except the batch size.
    """

    name: str
    target: torch.nn.Module
    draft: torch.nn.Module
    tokenizer: object
    place: torch.device
    prompts: argparse.Namespace = field(repr=False)

    def batches(self, rows: int) -> list[dict]:
        settings = argparse.Namespace(**{**vars(self.prompts), "batch_size": rows})
        batches = batches_for(settings, self.tokenizer, self.target)
        # Random prompts have one length. With texts of several, what is compiled would be compiled again for each.
        return batches if self.tokenizer is None else batches[:1]

    def launch(self, compile: bool = False) -> hf_ssd.DraftAssistant:
        """
        Raises:
            `RuntimeError`: the draft was to be compiled, and is not.
        """
        assistant = hf_ssd.launch_draft(self.draft, device=self.place, compile=compile)
        reason = assistant.workers[0].worker_info["uncompiled_because"] if compile else None
        if reason:
            assistant.close()
            raise RuntimeError(f"the draft does not compile: {reason}")
        return assistant


def names_of(args) -> list[str]:
    """Returns the names of the pairs to be measured."""
    return [f"{args.target} / {args.draft}"] if args.target else list(_sizes(args))


def _sizes(args) -> dict:
    return TINY if args.dry_run else SIZES


def prompts_of() -> argparse.Namespace:
    """Returns what [`~workload.batches_for`] needs for its own prompts, or random ones where there is no tokenizer."""
    return argparse.Namespace(prompts=None, prompt_length=32, repeats=4)


def load(name: str, args, layout: Layout) -> Pair:
    """Makes a layered pair, or loads the one that the user named."""
    settings = argparse.Namespace(
        target=args.target,
        draft=args.draft,
        layered=None if args.target else _sizes(args)[name],
        agreement=AGREEMENT,
        temperature=0.0,
        dtype="float32" if args.dry_run else "bfloat16",
        compile=False,
    )
    target, draft, tokenizer = load_pair(settings)
    if args.dry_run:
        torch.set_num_threads(1)
    # Drafting in the target's process has the target's device; the worker takes a copy to its own.
    return Pair(name, target, draft.to(target.device), tokenizer, layout.draft, prompts_of())


@contextlib.contextmanager
def memory_is_freed():
    """What the block leaves behind, compiled code included, makes room for the next pair."""
    try:
        yield
    finally:
        torch.compiler.reset()
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
