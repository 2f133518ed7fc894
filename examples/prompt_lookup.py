"""Answers that repeat their prompt: prompt lookup by hf_ssd and by transformers, and n-grams beside a draft.

    python examples/prompt_lookup.py --draft examples/pair/draft
    python examples/prompt_lookup.py --target FOLDER --gguf SmolLM2-135M-Instruct.Q4_1.gguf --dtype bfloat16 \
        --draft DRAFT_FOLDER

The prompts are made here: functions of hf_ssd to be written again with a change, and passages of its documents with a
question. No setting of hf_ssd was chosen on them. Methods take turns with each prompt; speeds are tokens per second of
whole calls, the prefill included, and the ratios to plain generate() are compared over the prompts. transformers looks
up for one prompt at a time, so a batch is compared without it. hf_ssd's planner starts anew in each process, and meets
other prompts first, which are not in the table.

With --draft there are two more methods: hf_ssd with this draft, whose n-grams compete with it, and with the draft alone
(`fallback="primary"`).
"""

import argparse
import inspect
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import hf_ssd
from hf_ssd import theory, timeline
from hf_ssd.cache import masks
from hf_ssd.generation import verification
from hf_ssd.serving import logprobs

DOCS = Path(__file__).parent.parent / "docs"
EDITS = [
    (masks.within_window, "Rename the argument `window` to `size`"),
    (masks.chains, "Rename the argument `count` to `rows`"),
    (logprobs.entries, "Rename the function to `described`"),
    (timeline.intervals, "Rename the argument `stats` to `statistics`"),
]
QUESTIONS = [
    ("troubleshooting.md", "What is to be done about low acceptance? Quote the passage."),
    ("statistics.md", "What is a round? Quote the passage."),
    ("quickstart.md", "What does the first command do? Quote the passage."),
    ("distributed.md", "How do target and draft start? Quote the passage."),
]
FIRST = [  # seen by the planner before anything is measured
    (theory.expected_tokens, "Rename the argument `lookahead` to `tokens`"),
    (theory.outcome_probabilities, "Rename the argument `acceptance_rate` to `rate`"),
    (theory.speculative_decoding_speedup, "Rename the function to `speedup`"),
    (verification.acceptance_probabilities, "Rename the argument `drafted` to `tokens`"),
]
PASSAGE = 900  # characters
FIRST_KIND = "not measured"


def prompts() -> dict[str, list[str]]:
    code = "{}. Answer with the whole function.\n\n```python\n{}```\n"
    passages = [(question, (DOCS / name).read_text(encoding="utf-8")[:PASSAGE]) for name, question in QUESTIONS]
    return {
        FIRST_KIND: [code.format(change, inspect.getsource(function)) for function, change in FIRST],
        "code edits": [code.format(change, inspect.getsource(function)) for function, change in EDITS],
        "questions": [f"{question}\n\n{passage}\n" for question, passage in passages],
    }


def encode(tokenizer, texts: list[str]) -> dict:
    if tokenizer.chat_template is None:
        return tokenizer(texts, return_tensors="pt", padding=True)
    messages = [[{"role": "user", "content": text}] for text in texts]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True, "padding": True}
    return tokenizer.apply_chat_template(messages, **options)


def measure(target, inputs: dict, methods: dict, new_tokens: int) -> dict[str, tuple[float, float]]:
    """Returns the tokens per second of each method, and its tokens per round where they are known."""
    measured = {}
    for name, options in methods.items():
        start = time.perf_counter()
        output = target.generate(
            **inputs, **options, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True
        )
        seconds = time.perf_counter() - start
        new = output.sequences[:, inputs["input_ids"].shape[1] :]
        tokens = int((new != target.generation_config.pad_token_id).sum())
        stats = getattr(output, "ssd_stats", None)
        measured[name] = tokens / seconds, stats.tokens_per_round if stats else float("nan")
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(DOCS.parent / "examples" / "pair" / "target"))
    parser.add_argument("--gguf", help="file in the folder of the target, if its weights are in one")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--draft", help="folder or hub id of a draft with which n-grams compete")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--lookup-tokens", type=int, nargs="*", default=[3, 10], help="of transformers")
    parser.add_argument("--batch", type=int, default=4, help="prompts of the batch; 0: no batch")
    parser.add_argument("--only", choices=[*prompts()][1:], help="one kind of prompts")
    parser.add_argument("--seconds", type=float, default=300.0, help="no prompt is begun after these")
    args = parser.parse_args()

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options = {"gguf_file": args.gguf} if args.gguf else {}
    tokenizer = AutoTokenizer.from_pretrained(args.target, padding_side="left", **options)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=getattr(torch, args.dtype), **options).eval()
    hf_ssd.enable(target)
    target.generation_config.pad_token_id = tokenizer.pad_token_id
    plain, ours = {"plain": {}}, {"hf_ssd": {"ssd_config": hf_ssd.SSDConfig(drafter="ngram")}}
    if args.draft:
        assistant = hf_ssd.launch_draft(args.draft, dtype=getattr(torch, args.dtype), target=target)
        both = {"tokenizer": tokenizer, "assistant_tokenizer": AutoTokenizer.from_pretrained(args.draft)}
        for name, settings in (("a draft and n-grams", {}), ("the draft alone", {"fallback": "primary"})):
            config = hf_ssd.SSDConfig(**settings)
            ours[f"hf_ssd, {name}"] = {"assistant_model": assistant, "ssd_config": config, **both}
    theirs = {f"transformers, {n} tokens": {"prompt_lookup_num_tokens": n} for n in args.lookup_tokens}
    start = time.perf_counter()
    target.generate(**encode(tokenizer, ["def f():"]), max_new_tokens=4, do_sample=False)
    print("| text | rows | method | over plain | range | tokens a round |\n| --- | --- | --- | --- | --- | --- |")
    for kind, texts in prompts().items():
        if args.only not in (None, kind) and kind != FIRST_KIND:
            continue
        sizes = [1, args.batch] if args.batch else [1]
        for rows in sizes:
            turns = []
            for first in range(0, len(texts), rows):
                if time.perf_counter() - start > args.seconds:
                    break
                inputs = encode(tokenizer, texts[first : first + rows])
                methods = {**plain, **ours, **theirs} if rows == 1 else {**plain, **ours}
                turns.append(measure(target, inputs, methods, args.max_new_tokens))
            for name in turns[0] if turns and kind != FIRST_KIND else ():
                ratios = [turn[name][0] / turn["plain"][0] for turn in turns]
                gained = statistics.median(turn[name][1] for turn in turns)
                spread = f"{min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else ""
                middle = statistics.median(ratios)
                if name != "plain":
                    print(f"| {kind} | {rows} | {name} | {middle:.2f} | {spread} | {gained:.2f} |".replace("nan", ""))
                else:
                    speeds = ", ".join(f"{turn[name][0]:.1f}" for turn in turns)
                    print(f"| {kind} | {rows} | plain | 1 | {speeds} tokens/s | |", flush=True)
    if args.draft:
        assistant.close()


if __name__ == "__main__":
    main()
