"""What does a long context cost? A verification and a plain step behind it, and drafting in turn beside other methods.

    python examples/long_context.py
    python examples/long_context.py --speeds

The first table needs no prefill, because its caches hold random numbers. It compares the attention of transformers,
which copies keys and values for each head of a group, with that of `hf_ssd.cache.attention`. With `--speeds` real
prompts are continued; tokens are counted from the first call of a stopping criterion to the last one, which leaves the
prefill out. One thread, float32, 8 layers with 16 query and 4 key heads of 64.
"""

import argparse
import statistics
import time

import torch
from layered_pair import Size, layered_pair, new_target
from tqdm.auto import tqdm
from transformers import DynamicCache, StoppingCriteriaList
from transformers.utils import logging

import hf_ssd
from hf_ssd.cache.cache_name import CACHE
from hf_ssd.cache.cached_model import CachedModel
from hf_ssd.cache.ragged import RaggedCache
from hf_ssd.cache.view import view_of

SIZE = Size(hidden=1024, layers=8, draft_layers=1, intermediate=2816, heads=16, kv_heads=4)
VERIFIED = 7  # the last token and six drafted ones
LOOKAHEAD = 6


def filled(config, context: int) -> DynamicCache:
    """Returns a cache with random keys and values of so many tokens."""
    cache, head_dim = DynamicCache(config=config), config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        states = torch.randn(2, 1, config.num_key_value_heads, context, head_dim)
        cache.update(*states, layer)
    return cache


@torch.inference_mode()
def milliseconds(model, context: int, turns: int) -> dict[str, float]:
    """Returns what a plain step and a verification take behind a context, medians of interleaved turns."""
    theirs = filled(model.config, context)
    views = view_of(model)[0], None  # the layers of the first one use the function of transformers
    without, ours = (CachedModel(model, RaggedCache(theirs), view=view) for view in views)
    tokens = torch.arange(1, VERIFIED + 1)[None]

    def plain():
        model(tokens[:, :1], **{CACHE: theirs})
        theirs.crop(-1)

    passes = {"plain step": plain, "verification, copied keys": lambda: without.extend(tokens, [context])}
    passes |= {"verification": lambda: ours.extend(tokens, [context])}
    seconds = {name: [] for name in passes}
    for turn in range(turns + 1):
        for name, run in passes.items():
            start = time.perf_counter()
            run()
            if turn:  # the first turn allocates
                seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(of_pass) for name, of_pass in seconds.items()}


def speeds(pair, context: int, new_tokens: int, seed: int) -> dict[str, float]:
    """Returns the tokens per second of each method behind one prompt, without the prefill."""
    target, draft = pair
    draft.generation_config.num_assistant_tokens = LOOKAHEAD
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    prompt = torch.randint(1, SIZE.vocab, (1, context), generator=torch.Generator().manual_seed(seed))
    fixed = hf_ssd.SSDConfig(lookahead=LOOKAHEAD, asynchronous=False)
    methods = {"plain": {}, "assisted": {"assistant_model": draft}}
    methods["SSD in turn"] = {"assistant_model": draft, "ssd_config": fixed}
    found = {}
    for name, method in methods.items():
        seen: list[tuple[float, int]] = []

        def clock(input_ids, scores, seen=seen, **kwargs):
            seen.append((time.perf_counter(), input_ids.shape[1]))
            return torch.zeros(len(input_ids), dtype=torch.bool)

        target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([clock]),
            **method,
        )
        (start, first), (end, last) = seen[0], seen[-1]
        found[name] = (last - first) / (end - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 2048, 8192, 32768], help="tokens")
    parser.add_argument("--turns", type=int, default=15, help="passes of each kind")
    parser.add_argument("--speeds", action="store_true", help="decode behind a prompt of 4,096 tokens instead")
    parser.add_argument("--prompts", type=int, default=3, help="with --speeds")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="with --speeds")
    args = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    if args.speeds:
        pair = layered_pair(SIZE, 0.9, dtype=torch.float32)
        hf_ssd.enable(pair[0])
        runs = [speeds(pair, 4096, args.max_new_tokens, seed) for seed in tqdm(range(args.prompts), unit="prompt")]
        for name in runs[0]:
            ratios = [run[name] / run["assisted"] for run in runs]
            median = statistics.median(run[name] for run in runs)
            print(f"| {name} | {median:.1f} | {min(ratios):.2f} to {max(ratios):.2f} |")
        return
    torch.manual_seed(0)
    model = new_target(SIZE, torch.float32)
    base = None
    print("| context | plain step, ms | verification, copied keys | verification | its context over a plain step's |")
    print("| --- | --- | --- | --- | --- |")
    for context in args.contexts:
        found = milliseconds(model, context, args.turns)
        base = base or found
        added = {name: found[name] - base[name] for name in found}
        ratio = f"{added['verification'] / added['plain step']:.2f}" if added["plain step"] else ""
        print(
            f"| {context:,} | " + " | ".join(f"{value:.0f}" for value in found.values()) + f" | {ratio} |", flush=True
        )


if __name__ == "__main__":
    main()
