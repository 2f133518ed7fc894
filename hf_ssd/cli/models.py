"""The two models of a command: their names and devices, and how they are loaded."""

import argparse
import contextlib
import functools
import os
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_ssd

from .. import devices
from ..config import DRAFTERS, could_be_hub_id
from ..distributed.assistant import DraftAssistant
from . import pair

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Models:
    """
    The target and the draft of a command.

    Args:
        target, draft (`str`): Hub ids or folders. The draft is `None` for prompt lookup, which needs none.
        device, draft_device (`torch.device`): The device of each model.
        dtype, draft_dtype (`torch.dtype`): The type of each model's weights.
        drafter (`str`): See [`SSDConfig`].
    """

    target: str
    draft: str | None
    device: torch.device
    draft_device: torch.device
    dtype: torch.dtype
    draft_dtype: torch.dtype
    drafter: str = "auto"

    @property
    def shares_memory(self) -> bool:
        """Whether both models are on the same device."""
        one, other = ((device.type, device.index or 0) for device in (self.device, self.draft_device))
        return one == other

    @functools.cached_property
    def tokenizer(self):
        """The target's tokenizer; `None` if it has none."""
        return load_tokenizer(self.target)

    @functools.cached_property
    def tokenizers(self) -> dict:
        """The arguments `tokenizer` and `assistant_tokenizer` of generate() if they differ; otherwise no arguments."""
        ours, theirs = self.tokenizer, None if self.draft is None else load_tokenizer(self.draft)
        if ours is None or theirs is None:
            return {}
        tokens = {i: token for token, i in ours.get_vocab().items()}
        if all(tokens.get(i, token) == token for token, i in theirs.get_vocab().items()):
            return {}
        return {"tokenizer": ours, "assistant_tokenizer": theirs}

    def load(self) -> tuple[PreTrainedModel, PreTrainedModel | None]:
        """Loads the models, enables the target, and returns target and draft."""
        target = hf_ssd.enable(load(self.target, self.dtype, self.device))
        return target, None if self.draft is None else load(self.draft, self.draft_dtype, self.draft_device)

    def launch_draft(self) -> contextlib.AbstractContextManager[DraftAssistant | None]:
        """Starts the draft's worker, if there is a draft, and returns it. Only the worker loads the draft."""
        if self.draft is None:
            return contextlib.nullcontext()
        return hf_ssd.launch_draft(self.draft, device=self.draft_device, dtype=self.draft_dtype)


def add_models(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that [`chosen`] reads."""
    group = parser.add_argument_group("models", "Without TARGET and DRAFT, the small pair that comes with hf_ssd.")
    group.add_argument("target", nargs="?", metavar="TARGET", help="hub id or folder of the large model")
    group.add_argument("draft", nargs="?", metavar="DRAFT", help="hub id or folder of the small model")
    group.add_argument("--device", metavar="DEVICE", help="of the target; default: the first accelerator, or the CPU")
    group.add_argument("--draft-device", metavar="DEVICE", help="default: the last accelerator, or the CPU")
    usual = "bfloat16 on an accelerator, float32 on the CPU"
    group.add_argument("--dtype", choices=DTYPES, metavar="DTYPE", help=f"default: {usual}")


def add_drafter(parser: argparse.ArgumentParser) -> None:
    """Adds the argument `--drafter`, which [`chosen`] reads."""
    text = "how tokens are drafted; ngram looks the prompt up and needs no DRAFT"
    parser.add_argument("--drafter", choices=DRAFTERS, default="auto", help=text)


def chosen(args: argparse.Namespace) -> Models:
    """
    Returns the models that the arguments ask for.

    Raises:
        `ValueError`: there is no such device, or the target has no draft.
    """
    drafter = getattr(args, "drafter", "auto")
    looks_up = drafter == "ngram"
    if looks_up and args.draft is not None:
        raise ValueError(f"--drafter ngram looks the prompt up and uses no draft; leave out {args.draft}.")
    if args.target is not None and args.draft is None and not looks_up:
        raise ValueError(f"Which draft is {args.target} to have? Name a DRAFT behind the TARGET.")
    found = devices.accelerators() or [torch.device("cpu")]
    device = found[0] if args.device is None else devices.existing(args.device)
    draft_device = found[-1] if args.draft_device is None else devices.existing(args.draft_device)
    usual = ("float32" if one.type == "cpu" else "bfloat16" for one in (device, draft_device))
    dtypes = (getattr(torch, args.dtype or name) for name in usual)
    names = args.target or pair.folder("target"), None if looks_up else args.draft or pair.folder("draft")
    return Models(*names, device, device if looks_up else draft_device, *dtypes, drafter)


def load(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """
    Loads a model.

    Raises:
        `ValueError`: the model does not load.
    """
    check_exists(name)
    try:
        return AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, device_map={"": device}, trust_remote_code=False
        ).eval()
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} does not load: {first_sentence(error)}") from error


def check_exists(name: str) -> None:
    """Raises `ValueError` if the name is no path of this machine and cannot be a hub id either."""
    if not os.path.exists(name) and not could_be_hub_id(name):
        raise ValueError(f"There is no folder {name!r}; give a folder with a model, or a hub id.")


def load_tokenizer(name: str):
    """Returns a tokenizer that pads on the left, or `None` for a model without a tokenizer, such as a random model."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", trust_remote_code=False)
    except (OSError, ValueError):
        return None
    if not tokenizer.vocab_size:  # made by transformers from the config alone, because the folder has no tokenizer
        return None
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def first_sentence(error: Exception) -> str:
    """Returns the first line of an error's message, or the error's type if the message is empty."""
    return str(error).strip().split("\n")[0] or type(error).__name__
