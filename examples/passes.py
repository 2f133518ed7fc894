"""What does a pass over a few tokens cost, in plain steps of generate()? With and without packed weights.

    python examples/passes.py --layered 493m/119m
    python examples/passes.py --target ~/.cache/hf_ssd/qwen-coder-1.5b --dtype bfloat16

Speculative decoding rests on passes over a few tokens that cost as much as a pass over one. On a CPU this holds once
the weights are packed (`SSDConfig(pack_weights=...)`). All passes take turns, and the median of the turns counts.
"""

import argparse
import os
import statistics
import time

import torch
from layered_pair import SIZES, new_target
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from workload import PAIR, say_how_busy

from hf_ssd.cache.passes import cached_model
from hf_ssd.cache.ragged import RaggedCache
from hf_ssd.distributed.cores import available_cores

STEPS = 6  # plain steps that are timed together


def plain_step(model, prompt: torch.LongTensor):
    """Returns a function that times a step of generate(): a longer call less a shorter one, over the steps between."""

    def seconds(new_tokens: int) -> float:
        start = time.perf_counter()
        model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, min_new_tokens=new_tokens,
                       max_new_tokens=new_tokens)  # fmt: skip
        return time.perf_counter() - start

    return lambda: (seconds(1 + STEPS) - seconds(1)) / STEPS


def verification(model, prompt: torch.LongTensor, tokens: int, pack_weights: bool | str):
    """Returns a function that times a pass of hf_ssd over so many tokens after the prompt."""
    decoder = cached_model(model, RaggedCache(), pack_weights=pack_weights)
    fed = prompt[:, :1].expand(-1, tokens).contiguous()
    decoder.extend(prompt, [0])

    def seconds() -> float:
        start = time.perf_counter()
        decoder.extend(fed, [prompt.shape[1]])
        return time.perf_counter() - start

    return seconds


@torch.no_grad()  # weights made in inference mode do not count their changes, and are not packed
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default=str(PAIR / "target"), help="hub id or folder of a model")
    parser.add_argument("--layered", choices=SIZES, help="a random model of this size instead")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 3, 5, 7, 9, 17], help="of the passes")
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    logging.set_verbosity_error()
    load, dtype = os.getloadavg()[0], getattr(torch, args.dtype)
    torch.set_num_threads(len(available_cores()))
    torch.manual_seed(0)
    if args.layered:
        model = new_target(SIZES[args.layered], dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).eval()
    prompt = torch.randint(3, model.config.vocab_size, (1, args.prompt_length))
    plain = plain_step(model, prompt)
    passes = {(n, pack): verification(model, prompt, n, pack) for pack in (False, True) for n in args.tokens}
    times = {key: [] for key in ("plain", *passes)}
    for _ in tqdm(range(args.turns), desc="measuring", unit="turn", disable=None):
        times["plain"].append(plain())
        for key, seconds in passes.items():
            seconds()  # reads weights that other passes have pushed out of the processor's cache
            times[key].append(seconds())
    step = statistics.median(times["plain"])
    print(f"A plain step of generate(): {1e3 * step:.1f} ms; {args.dtype}, {torch.get_num_threads()} threads\n")
    print("| tokens of a pass | " + " | ".join(map(str, args.tokens)) + " |\n| --- |" + " --- |" * len(args.tokens))
    for pack in (False, True):
        ratios = [statistics.median(times[n, pack]) / step for n in args.tokens]
        name = "packed weights" if pack else "weights as they are"
        print(f"| {name}, in plain steps | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    print()
    say_how_busy(load, [[one / step for one in times["plain"]]])


if __name__ == "__main__":
    main()
