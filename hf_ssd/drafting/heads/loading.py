"""Finds heads in folders, in models of transformers and in the target itself, and keeps them for the next call."""

import os
import weakref
from collections.abc import Callable

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ... import devices
from ...cache.support import is_flash_attention
from ...gguf_files import is_gguf
from .base import Head
from .dflash import DFlashHead
from .eagle3 import Eagle3Head
from .gemma4 import Gemma4Head
from .mtp import MtpHead, load_mtp_head

HEADS: tuple[type[Head], ...] = (Eagle3Head, DFlashHead, Gemma4Head)
_heads: "weakref.WeakKeyDictionary[PreTrainedModel, dict[type, Head]]" = weakref.WeakKeyDictionary()  # of targets


def kind_of(draft: PreTrainedModel | str | os.PathLike) -> tuple[type[Head] | None, dict]:
    """Returns the kind of head that a model or a folder is, and the values of its config. `None` for other drafts."""
    if isinstance(draft, PreTrainedModel):
        path, values = draft.config._name_or_path, {**vars(draft.config), "model_type": draft.config.model_type}
    elif is_gguf(draft):
        return None, {}
    else:
        path = os.fspath(draft)
        try:
            values, _ = PreTrainedConfig.get_config_dict(path)
        except (OSError, ValueError):
            return None, {}
    if isinstance(draft, Head):
        return type(draft), values
    return next((kind for kind in HEADS if kind.is_assistant(values) or kind.is_format(path, values)), None), values


def head_for(
    draft: PreTrainedModel | str | os.PathLike, target: PreTrainedModel, dtype: torch.dtype | None = None
) -> Head | None:
    """Returns the head that a folder holds or a model is, `None` for another draft, or raises `ValueError`."""
    (kind, values), is_model = kind_of(draft), isinstance(draft, PreTrainedModel)
    if kind is None or isinstance(draft, Head):
        return draft if kind else None
    if is_model != kind.is_assistant(values):
        raise refusal(draft, kind, values)
    return _of_assistant(draft, target, kind) if is_model else kind.load(os.fspath(draft), values, target, dtype)


def structure_at(path: str | os.PathLike, target: PreTrainedModel) -> Head | None:
    """Returns the head in a folder on the meta device, or `None` if there is none."""
    kind, values = kind_of(path)
    with torch.device("meta"):
        return None if kind is None else kind.structure(os.fspath(path), values, target)


def _of_assistant(assistant: PreTrainedModel, target: PreTrainedModel, kind: type[Head]) -> Head:
    place = target.get_input_embeddings().weight.device
    if devices.of_model(assistant) != place:
        raise ValueError(
            f"The assistant is on {devices.of_model(assistant)}, and drafts where the target's embedding is; move it "
            f"with `assistant.to({str(place)!r})`."
        )
    if is_flash_attention(assistant):
        raise ValueError(
            "The assistant uses flash attention, which takes no 4D masks; call "
            'assistant.set_attn_implementation("sdpa").'
        )
    known = _heads.setdefault(target, {})
    if kind not in known or known[kind].assistant is not assistant:
        known[kind] = kind(assistant, target).eval()
    return known[kind]


def mtp_head_of(target: PreTrainedModel) -> MtpHead:
    """Returns the MTP head of a target, which is loaded once. See [`load_mtp_head`]."""
    known = _heads.setdefault(target, {})
    if MtpHead not in known or devices.of_model(known[MtpHead]) != devices.of_model(target):
        known[MtpHead] = load_mtp_head(target)
    return known[MtpHead]


OF_TARGET: dict[str, Callable[[PreTrainedModel], Head]] = {"mtp": mtp_head_of}
"""Heads that the target itself has, by the name of their drafter and fallback in [`SSDConfig`]."""


def refusal(draft: PreTrainedModel | str | os.PathLike, kind: type[Head], values: dict) -> ValueError:
    is_model = isinstance(draft, PreTrainedModel)
    name = type(draft).__name__ if is_model else repr(os.fspath(draft))
    if not kind.drafts_in_turn:
        remedy = f"pass {'its folder or hub id' if is_model else '`target=...` to hf_ssd.launch_draft() as well'}."
    elif kind.is_assistant(values):
        remedy = "it drafts in the target's process: load it with transformers and pass the model as `assistant_model`."
    else:
        remedy = "it drafts in the target's process: pass its folder or hub id as `assistant_model` to generate()."
    return ValueError(f"The draft {name} is {kind.title}, which reads hidden states of its target; {remedy}")
