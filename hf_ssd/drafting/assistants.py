"""Assistants of transformers that read hidden states, or keys and values, of their target."""

import os
import weakref

from transformers import PreTrainedConfig, PreTrainedModel

from .. import devices
from ..cache.support import is_flash_attention
from .dflash_head import DFlashHead
from .gemma4_assistant import Gemma4AssistantHead

HEADS = {
    "gemma4_assistant": Gemma4AssistantHead,
    "gemma4_unified_assistant": Gemma4AssistantHead,
    "muse_glimmer_assistant": DFlashHead,
}
_heads: "weakref.WeakKeyDictionary[PreTrainedModel, PreTrainedModel]" = weakref.WeakKeyDictionary()  # of targets


def is_assistant(config: PreTrainedConfig) -> bool:
    """Whether a model with this config is an assistant that drafts in its target's process."""
    return getattr(config, "model_type", None) in HEADS


def head_of_assistant(assistant: PreTrainedModel, target: PreTrainedModel) -> PreTrainedModel:
    """
    Returns the assistant in the form in which it drafts for the target, which is kept for the next call.

    Raises:
        `ValueError`: the assistant is on another device, uses flash attention, or was made for another target.
    """
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
    head = _heads.get(target)
    if head is None or head.assistant is not assistant:
        head = _heads[target] = HEADS[assistant.config.model_type](assistant, target).eval()
    return head


def refuse_dflash(config: PreTrainedConfig) -> None:
    """Raises `ValueError` for a DFlash draft as a model with code of its own, or for a worker."""
    if getattr(config, "dflash_config", None) is not None:
        raise ValueError(
            "A DFlash draft whose config has `dflash_config` drafts in the target's process, without code of its own; "
            "pass its folder or hub id as `assistant_model` to generate()."
        )


def refuse_worker(draft: PreTrainedModel | str | os.PathLike, config: PreTrainedConfig) -> None:
    """Raises `ValueError` for a draft that no worker can use: an assistant, or a DFlash draft."""
    refuse_dflash(config)
    if is_assistant(config):
        name = type(draft).__name__ if isinstance(draft, PreTrainedModel) else repr(os.fspath(draft))
        raise ValueError(
            f"The draft {name} reads its target's states in each round, so it drafts in the target's process; load it "
            "with transformers and pass the model as `assistant_model`."
        )
