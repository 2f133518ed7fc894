"""Which rule of sampling is faster? Tokens per second of `verification="coupled"` over those of `"rejection"`.

    python examples/sampling_rules.py
    python examples/sampling_rules.py --pair FOLDER --kind chat --max-new-tokens 24
    python examples/sampling_rules.py --layered 287m/39m --agreement 0.85

Both rules take turns with the same prompts, planned by `SSDConfig()` with a worker and with the draft in turn. The
first turn of each batch size and temperature does not count. A folder has the folders `target` and `draft`. A layered
pair has the agreement that is asked for at temperature 1, and gets random tokens.
"""

import argparse
import itertools
import statistics
import time
from pathlib import Path

import prompt_kinds
import torch
from ablations import PROMPTS
from layered_pair import SIZES, layered_pair
from own_texts import as_messages, load_tokenizer
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, set_seed
from transformers.utils import logging
from workload import PAIR

import hf_ssd
from hf_ssd.config import COUPLED, REJECTION

WAYS = {"with a worker": True, "in turn": False}


def batches(args, target, rows: int) -> list[dict[str, torch.LongTensor]]:
    """Returns the inputs of each turn."""
    turns = args.repeats + 1
    if args.layered:
        set_seed(0)
        drawn = torch.randint(1, target.config.vocab_size, (turns, rows, 24))
        return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in drawn]
    tokenizer = load_tokenizer(str(args.pair / "target"))
    texts = as_messages(prompt_kinds.held_out(turns * rows)[args.kind] if args.kind else PROMPTS, tokenizer)
    options = {"padding": True, "return_tensors": "pt", "return_token_type_ids": False}
    return [tokenizer(texts[turn * rows :][:rows], **options) for turn in range(turns)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pair", type=Path, default=PAIR, metavar="FOLDER")
    parser.add_argument("--layered", choices=SIZES, help="a random pair of this size instead, see layered_pair.py")
    parser.add_argument("--agreement", type=float, default=0.85, help="acceptance rate of the random pair")
    parser.add_argument("--kind", choices=prompt_kinds.all_prompts(), help="of prompts, for a chat template")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=2, help="turns that count")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if args.layered:
        target, draft = layered_pair(args.layered, args.agreement, 1.0, torch.float32)
    else:
        folders = (args.pair / name for name in ("target", "draft"))
        target, draft = (AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval() for folder in folders)
    hf_ssd.enable(target)
    length = {"max_new_tokens": args.max_new_tokens, "min_new_tokens": args.max_new_tokens}
    print("  T  rows            way  rejection  coupled  coupled over rejection")
    with hf_ssd.launch_draft(draft) as assistant:
        for temperature, rows in itertools.product(args.temperatures, args.batch_sizes):
            speeds = {of: [] for of in itertools.product(WAYS, (REJECTION, COUPLED))}
            turns = tqdm(batches(args, target, rows), f"T = {temperature:g}, {rows} rows", leave=False)
            for turn, inputs in enumerate(turns):
                for (way, rule), of in speeds.items():
                    config = hf_ssd.SSDConfig(verification=rule, asynchronous=WAYS[way])
                    set_seed(turn)
                    start = time.perf_counter()
                    target.generate(
                        **inputs, **length, do_sample=True, temperature=temperature, top_k=0,
                        assistant_model=assistant, ssd_config=config,
                    )  # fmt: skip
                    if turn:
                        of.append(rows * args.max_new_tokens / (time.perf_counter() - start))
            for way in WAYS:
                rejection, coupled = (statistics.median(speeds[way, rule]) for rule in (REJECTION, COUPLED))
                numbers = f"{rejection:9.2f}  {coupled:7.2f}  {coupled / rejection:22.3f}"
                print(f"{temperature:3g}  {rows:4}  {way:>13}  {numbers}", flush=True)


if __name__ == "__main__":
    main()
