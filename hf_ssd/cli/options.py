"""Options that several commands have, and types by which argparse refuses wrong values before anything is loaded."""

import argparse
import math
from collections.abc import Callable

from ..config import COUPLED, DRAFTERS, LONGEST_LOOKAHEAD, MOST_NODES, SSDConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def shared() -> argparse.ArgumentParser:
    """Returns a parent of the parsers of all commands, with the options that `models.chosen` reads."""
    parent = argparse.ArgumentParser(add_help=False)
    group = parent.add_argument_group("models", "Without TARGET and DRAFT, the small pair that comes with hf_ssd.")
    group.add_argument("target", nargs="?", metavar="TARGET", help="hub id, folder or GGUF file of the large model")
    group.add_argument("draft", nargs="?", metavar="DRAFT", help="hub id, folder or GGUF file of the small model")
    group.add_argument("--draft", dest="draft_named", metavar="DRAFT", help="another way to name the DRAFT")
    for side, of in (("", "of the target"), ("draft-", "of the draft")):
        place = "the last accelerator" if side else "the first accelerator"
        usual = "as --dtype" if side else "bf16 on an accelerator, fp32 on the CPU"
        kinds = {"type": lambda name: SHORT_DTYPES.get(name, name), "choices": DTYPES, "metavar": "DTYPE"}
        group.add_argument(f"--{side}device", metavar="DEVICE", help=f"{of}; default: {place}, or the CPU")
        group.add_argument(f"--{side}dtype", **kinds, help=f"{of}: auto, fp32, bf16 or fp16; default: {usual}")
        group.add_argument(f"--{side}tokenizer", metavar="NAME", help=f"hub id or folder, if not that {of}")
        group.add_argument(f"--{side}gguf-file", metavar="FILE", help=f"{of}, in its folder or repository")
        group.add_argument(f"--{side}revision", metavar="NAME", help=f"{of}: a branch, tag or commit of the hub")
    group.add_argument("--attn-implementation", metavar="NAME", help="of the target, as in transformers")
    group.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the models")
    group.add_argument("--threads", type=at_least(1), metavar="N", help="CPU cores for both models; default: all")
    group.add_argument("--draft-threads", type=at_least(1), metavar="N", help="of them for the draft; default: 1/4")
    add_speculation(parent)
    return parent


def add_speculation(parser: argparse.ArgumentParser) -> None:
    """Adds the options that [`settings`] reads."""
    group, lookahead = parser.add_argument_group("speculation"), at_least(1, below=LONGEST_LOOKAHEAD + 1)
    group.add_argument("--drafter", choices=DRAFTERS, help="how the draft proposes tokens; default: auto")
    group.add_argument("--lookahead", type=lookahead, metavar="N", help="drafted tokens a round; default: planned")
    group.add_argument("--budget", type=at_least(1), metavar="N", help="outcomes to prepare; default: planned")
    nodes = at_least(1, below=MOST_NODES + 1)
    group.add_argument("--tree-nodes", type=nodes, metavar="N", help="tokens to verify a round; default: those drafted")


def settings(args: argparse.Namespace) -> SSDConfig:
    """Returns the settings of speculation that the arguments ask for. A seed repeats a sampled text."""
    asked = {name: getattr(args, name, None) for name in ("drafter", "lookahead", "budget", "tree_nodes")}
    return SSDConfig(verification=COUPLED, **{name: value for name, value in asked.items() if value is not None})


def add_answers(parser, default: int, low: int = 1) -> None:
    text = f"tokens of an answer; default: {default}"
    parser.add_argument("--max-new-tokens", type=at_least(low), default=default, metavar="N", help=text)
    parser.add_argument("--temperature", type=at_least(0, float), default=0.0, metavar="T", help="0 (default): greedy")


def add_prompts(parser) -> None:
    parser.add_argument("--prompts", metavar="FILE", help="JSON objects, one a line; default: snippets of Python")
    parser.add_argument("--prompt-field", default="prompt", metavar="KEY", help="of a prompt in its object (prompt)")


def at_least(low: float, kind: type = int, below: float = math.inf) -> Callable[[str], float]:
    """Returns an argparse type for an `int` or `float` from `low` to `below`, which is not allowed itself."""

    def number(text: str) -> float:
        value = kind(text)
        if not low <= value < below:  # also true of NaN
            end = "" if below == math.inf else f" and below {below}"
            raise argparse.ArgumentTypeError(f"must be a number of at least {low}{end}, but is {text}")
        return value

    number.__name__ = kind.__name__  # argparse says "invalid int value"
    return number


def core_numbers(text: str) -> tuple[int, ...]:
    """Returns the cores in a list such as 0,1,2."""
    from ..distributed.cores import available_cores  # torch takes seconds to import

    cores, here = tuple(int(core) for core in text.split(",")), available_cores()
    if not set(cores) <= set(here):
        raise argparse.ArgumentTypeError(f"this program may use the cores {','.join(map(str, here))}, not {text}")
    return cores
