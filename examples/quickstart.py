"""See a completion as it is generated, and what speculative speculative decoding gains on this machine.

    python examples/quickstart.py
    python examples/quickstart.py --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --prompt "Why is the sky blue?"

Without options it runs the small pair in `examples/pair`, which completes Python code.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, set_seed
from transformers.utils import logging
from workload import is_busy, say_how_busy

import hf_ssd
from hf_ssd import devices
from hf_ssd.cli.terminal import warnings_held

PAIR = Path(__file__).parent / "pair"
UNSTEADY = 4 / 3  # highest over lowest speedup of a method in the turns
FASTER = 1.05  # a speedup that is called one
PROMPT = '''class Reader:
    """Read lines from a file."""

    def __init__(self, path):
'''


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default=str(PAIR / "target"), help="hub id or folder of the large model")
    parser.add_argument("--draft", default=str(PAIR / "draft"), help="hub id or folder of the small model")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--lookahead", type=int, help="default: planned while it generates")
    parser.add_argument("--budget", type=int, help="default: planned while it generates")
    parser.add_argument("--repeats", type=int, default=5, help="most runs of each method; the median counts")
    parser.add_argument("--seconds", type=float, default=30.0, help="no further runs after so many seconds")
    return parser.parse_args()


def load_pair(args):
    """The target on the first GPU and the draft on the last; without a GPU both on the CPU, in float32."""
    places = devices.accelerators() or [torch.device("cpu")]
    dtype = torch.float32 if places[0].type == "cpu" else torch.bfloat16
    models = [
        AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(place).eval()
        for name, place in zip((args.target, args.draft), (places[0], places[-1]))
    ]
    return hf_ssd.enable(models[0]), models[1], AutoTokenizer.from_pretrained(args.target)


def main() -> None:
    args, load = parse_arguments(), os.getloadavg()[0]
    busy = is_busy(load)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target, draft, tokenizer = load_pair(args)
    on_cpu = target.device.type == "cpu"
    config = hf_ssd.SSDConfig(lookahead=args.lookahead or "auto", budget=args.budget or "auto")
    inputs = tokenizer(args.prompt, return_tensors="pt", return_token_type_ids=False).to(target.device)
    options = {"max_new_tokens": args.max_new_tokens, "return_dict_in_generate": True}
    options |= {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    synchronous = hf_ssd.SSDConfig(**{**config.to_dict(), "asynchronous": False})
    assistant = hf_ssd.launch_draft(draft)  # given the draft itself, SSD's first call would go on without it at first
    methods = {
        "plain generate": {},
        "assisted generation": {"assistant_model": draft},
        "SSD, synchronous": {"assistant_model": draft, "ssd_config": synchronous},
        "SSD": {"assistant_model": assistant, "ssd_config": config},
    }

    # 1. A completion, as it is generated.
    with warnings_held():
        target.generate(**inputs, **options, **methods["SSD"], streamer=TextStreamer(tokenizer))

    # 2. Every method in turn, again and again, so that what else the machine does falls on all of them alike.
    speeds, outputs = {name: [] for name in methods}, {}
    started = time.perf_counter()
    for repeat in tqdm(range(args.repeats + 1), desc="measuring", unit="round", leave=False):
        if repeat > 1 and time.perf_counter() - started > args.seconds * repeat / (repeat + 1):
            break  # another round would take longer
        for name, how in list(methods.items()):
            set_seed(0)
            start = time.perf_counter()
            try:
                outputs[name] = target.generate(**inputs, **options, **how)
            except ValueError:
                if name != "assisted generation":
                    raise
                print("transformers' assisted generation refuses this draft: its vocabulary has another size.")
                del methods[name], speeds[name]
                continue
            seconds = time.perf_counter() - start
            new_tokens = outputs[name].sequences.shape[1] - inputs["input_ids"].shape[1]
            if repeat:  # the first round warms up
                speeds[name].append(new_tokens / seconds)

    # 3. A sentence, and one table.
    plain = outputs["plain generate"].sequences
    ratios = {name: [x / base for x, base in zip(speeds[name], speeds["plain generate"])] for name in methods}
    print(
        "\n" + in_a_sentence(ratios["SSD"], torch.equal(outputs["SSD"].sequences, plain) or args.temperature > 0, busy)
    )
    where = f"{torch.get_num_threads()} CPU threads" if on_cpu else devices.name(target.device)
    print(f"\n{args.max_new_tokens} new tokens, lookahead {config.lookahead}, budget {config.budget}, {where}")
    print(
        f"{'':<20} {'tokens/s':>9} {'speedup':>9} {'in the turns':>12} {'tokens/round':>13} {'hit rate':>9} "
        f"{'same tokens as plain':>21}"
    )
    for name in methods:
        stats = getattr(outputs[name], "ssd_stats", None)
        speed, turns = statistics.median(speeds[name]), f"{min(ratios[name]):.2f}-{max(ratios[name]):.2f}"
        ratio = "unsteady" if are_unsteady(ratios[name], busy) else f"{statistics.median(ratios[name]):.2f}x"
        per_round, hits = (f"{stats.tokens_per_round:.2f}", f"{stats.hit_rate:.2f}") if stats else ("", "")
        same = "sampled" if args.temperature else "yes" if torch.equal(outputs[name].sequences, plain) else "NO"
        print(f"{name:<20} {speed:>9.1f} {ratio:>9} {turns:>12} {per_round:>13} {hits:>9} {same:>21}")
    print()
    say_how_busy(load, list(ratios.values()))
    print(f"\nThe last run of SSD: {outputs['SSD'].ssd_stats}")


def are_unsteady(ratios: list[float], busy: bool) -> bool:
    """Whether the median of a method's turns says nothing: they differ by more than a third, or one is all there is."""
    return max(ratios) > UNSTEADY * min(ratios) or (busy and len(ratios) == 1)


def in_a_sentence(ratios: list[float], is_same: bool, busy: bool) -> str:
    """Returns what the measurement says, for a reader who knows none of its words."""
    if not is_same:
        return "hf_ssd wrote OTHER tokens than plain generate(). Please report this."
    if are_unsteady(ratios, busy):
        differ = f"the measurements differ by {max(ratios) / min(ratios) - 1:.0%}"
        return (
            "It cannot be said whether hf_ssd is faster here: other programs use this machine, and "
            f"{differ if len(ratios) > 1 else 'there was time for one measurement only'}. Run it again when the "
            "machine is quiet."
        )
    ratio = statistics.median(ratios)
    if ratio < FASTER:
        return f"hf_ssd wrote the text at {ratio:.2f} times the speed of plain generate(): no gain with this pair here."
    return f"hf_ssd wrote the text {ratio:.2f} times as fast as plain generate()."


if __name__ == "__main__":
    main()
