"""What the checkpoints of a hybrid target cost: refeeds, copies of states and commits, in ms a round.

python examples/refeeds.py
python examples/refeeds.py --target PAIR/target --acceptance 0.86 --lookahead 7

Rounds are made up: each drafted token is accepted with the given chance, and all limits see the same rounds. A limit is
the number of tokens fed again after which a pass of its own shortens refeeds. No draft runs. One thread of a CPU is
timed, by its own clock.
"""

import argparse
import random
import time
from contextlib import ExitStack
from unittest import mock

import torch
from layered_pair import SIZES, new_target
from transformers import AutoModelForCausalLM, BambaConfig, DynamicCache, Lfm2Config
from transformers.utils import logging

from hf_ssd.cache import recurrent
from hf_ssd.cache.cache_name import CACHE
from hf_ssd.cache.passes import cached_model
from hf_ssd.cache.ragged import RaggedCache
from hf_ssd.cache.recurrent import RecurrentModel

WIDTHS = (1, 2, 5, 9, 17, 33, 65)
SHARED = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 16, "vocab_size": 8192}
SHARED |= {"num_attention_heads": 12, "num_key_value_heads": 4, "pad_token_id": 0, "eos_token_id": None}
FULL = [1, 5, 9, 13]  # layers with attention
SHAPES = {
    "gated delta rule": lambda dtype: new_target(SIZES["221m/42m"], dtype),
    "Mamba-2": lambda dtype: AutoModelForCausalLM.from_config(
        BambaConfig(**SHARED, attn_layer_indices=FULL, mamba_n_heads=24, mamba_d_head=64, mamba_d_state=128),
        dtype=dtype,
    ),
    "convolution": lambda dtype: AutoModelForCausalLM.from_config(
        Lfm2Config(**SHARED, layer_types=["full_attention" if i in FULL else "conv" for i in range(16)]), dtype=dtype
    ),
}


def prefilled(model, prompt: torch.LongTensor) -> RecurrentModel:
    cache = RaggedCache(DynamicCache(config=model.config.get_text_config(decoder=True)))
    model(prompt, **{CACHE: cache}, use_cache=True)
    return cached_model(model, cache)


@torch.inference_mode()
def pass_ms(model, prompt: torch.LongTensor, tokens: int, repeats: int) -> float:
    """A pass over so many tokens behind a checkpoint, at its fastest."""
    decoder, fed, times = prefilled(model, prompt), prompt[:, :1].expand(-1, tokens), []
    for _ in range(repeats):
        start = time.thread_time()
        decoder.extend(fed, [prompt.shape[1]])
        times.append(time.thread_time() - start)
    return 1e3 * min(times)


@torch.inference_mode()
def replay(model, prompt: torch.LongTensor, accepted: list[int], lookahead: int, limit: int) -> torch.Tensor:
    """
    Verifies rounds with this limit. Returns for each round the ms of all, of commits and of copies, and how many tokens
    were fed again: `(rounds, 4)`.
    """
    decoder, length, spent = prefilled(model, prompt), prompt.shape[1], {}

    def timed(function, name):
        def call(*arguments):
            start = time.thread_time()
            result = function(*arguments)
            spent[name] = spent.get(name, 0.0) + 1e3 * (time.thread_time() - start)
            return result

        return call

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(recurrent, "WORTH_A_PASS", limit))
        for kind, name, part in (
            (RecurrentModel, "_commit", "commits"),
            (RecurrentModel, "copies", "copies"),
        ):
            stack.enter_context(mock.patch.object(kind, name, timed(getattr(kind, name), part)))
        extend, rounds = timed(decoder.extend, "all"), []
        for count in accepted:
            spent.clear()
            extend(torch.randint(1, model.config.vocab_size, (1, lookahead + 1)), [length])
            rounds.append([*(spent.get(name, 0.0) for name in ("all", "commits", "copies")), length])
            rounds[-1][3] -= decoder.checkpoints[0]
            length += count + 1
    return torch.tensor(rounds, dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", help="hub id or folder; by default random models of three kinds")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--limits", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3, help="of which each round counts at its fastest")
    args = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    dtype, chance = getattr(torch, args.dtype), random.Random(0)
    tokens = range(args.lookahead)
    accepted = [next((n for n in tokens if chance.random() > args.acceptance), len(tokens)) for _ in range(args.rounds)]
    made = {args.target: lambda dtype: AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype)}
    for name, make in (made if args.target else SHAPES).items():
        torch.manual_seed(0)
        model = make(dtype).eval()
        prompt = torch.randint(1, model.config.vocab_size, (1, 64))
        passes = {width: pass_ms(model, prompt, width, 3 * args.repeats) for width in (*WIDTHS, args.lookahead + 1)}
        print(f"\n{name}: ms of a pass by its tokens:", ", ".join(f"{n}: {ms:.1f}" for n, ms in passes.items()))
        runs = {limit: [] for limit in args.limits}
        for turn in range(args.repeats):
            for limit in args.limits[:: 1 if turn % 2 else -1]:
                runs[limit].append(replay(model, prompt, accepted, args.lookahead, limit))
        means = {limit: torch.stack(of_limit).amin(0).mean(0).tolist() for limit, of_limit in runs.items()}
        print("limit  round ms  over the best  tokens refed  refeeds ms  commits ms  copies ms")
        for limit, (whole, commits, copies, refed) in means.items():
            refeeds = whole - commits - passes[args.lookahead + 1]
            print(
                f"{limit:5}  {whole:8.1f}  {whole / min(of_all[0] for of_all in means.values()):13.3f}  {refed:12.1f}  "
                f"{refeeds:10.1f}  {commits:10.1f}  {copies:9.2f}"
            )


if __name__ == "__main__":
    main()
