"""The drafts that were passed to generate() as models, folders or hub ids, and the workers that it started for them."""

import os
import threading
import weakref

from transformers import PreTrainedModel
from transformers.utils import logging

from ..cache.support import without_wrapper
from ..drafting.assistants import head_of_assistant, is_assistant, refuse_dflash
from ..drafting.dflash_formats import dflash_values, load_dflash
from ..drafting.eagle_formats import head_values, load_head
from ..drafting.needs import DraftInfo
from .assistant import DraftAssistant
from .child import check_system
from .cores import divide_cores
from .launch import START_TIMEOUT, device_for, draft_config, new_assistant, worker_settings
from .rebuilding import structure_of
from .shared_weights import SharedWeights

logger = logging.get_logger(__name__)

_assistants: "weakref.WeakKeyDictionary[PreTrainedModel, DraftAssistant]" = weakref.WeakKeyDictionary()
_assistants_of_paths: dict[str, DraftAssistant] = {}
_heads: "weakref.WeakKeyDictionary[PreTrainedModel, dict]" = weakref.WeakKeyDictionary()  # of each target, by path
_refused: "weakref.WeakKeyDictionary[PreTrainedModel, tuple]" = weakref.WeakKeyDictionary()  # with their structures
_starting = threading.Lock()


def head_for(draft, target: PreTrainedModel):
    """
    Returns the draft that was passed to generate(), or for the folder or hub id of an EAGLE-3 head or DFlash draft the
    head, and for an assistant of transformers the head that it is. They are made once for each target.
    """
    if isinstance(draft, PreTrainedModel):
        refuse_dflash(draft.config)
        if is_assistant(draft.config):
            return head_of_assistant(draft, target)
    path = os.fspath(draft) if isinstance(draft, (str, os.PathLike)) else None
    if path is None or path in _assistants_of_paths:
        return draft
    known = _heads.setdefault(target, {})
    if path not in known:
        if (values := head_values(path)) is not None:
            known[path] = load_head(path, target, values=values)
        elif (values := dflash_values(path)) is not None:
            known[path] = head_of_assistant(load_dflash(path, target, values), target)
        else:
            return draft
    return known[path]


def assistant_for(draft: PreTrainedModel | str | os.PathLike) -> DraftAssistant | None:
    """
    Returns the assistant for a draft that was passed to generate(): one for each draft and process, made without
    waiting for its worker, and ended with the model or the program. It is replaced when the model has other layers,
    shapes or dtypes. For a model that a worker cannot rebuild, returns `None` and logs the reason once.
    """
    is_model = isinstance(draft, PreTrainedModel)
    known, key = (_assistants, draft) if is_model else (_assistants_of_paths, os.fspath(draft))
    with _starting:
        assistant = known.get(key)
        if assistant is not None and assistant.process == os.getpid():
            if not is_model or assistant.weights.fits():
                return assistant
            assistant.close()
        if is_model and draft in _refused and _refused[draft] == structure_of(draft):
            return None
        try:
            check_system()
            weights = SharedWeights(draft) if is_model else None
        except ValueError as error:
            if not is_model:
                raise
            logger.warning(f"The draft works in turn with the target, in this process. {error}")
            known.pop(key, None)
            _refused[draft] = structure_of(draft)
            return None
        info, device = info_of(draft), device_for(draft, None)
        cores = divide_cores() if device.type == "cpu" else None
        settings = {**worker_settings(draft, None, None, {}), "timeout": START_TIMEOUT}
        assistant = known[key] = new_assistant(draft, weights, [device], cores, settings, wait=False)
        assistant.info, assistant.device = info, str(device)
        return assistant


def close(assistant_model: PreTrainedModel | str | os.PathLike | None = None) -> None:
    """
    Ends the workers that calls of `generate()` have started for a draft that was passed as a model, a folder or a hub
    id. Otherwise the workers end with the model or the program. A later call of `generate()` starts another worker. The
    [`DraftAssistant`] that [`~hf_ssd.launch_draft`] returns has a `close()` of its own.

    Args:
        assistant_model (`PreTrainedModel`, `str` or `os.PathLike`, *optional*): The draft whose worker ends, as it was
            passed to `generate()`. By default the workers of all drafts end.

    Raises:
        `TypeError`: `assistant_model` is not a model, folder or hub id.
    """
    draft = without_wrapper(assistant_model)
    with _starting:
        if draft is None:
            ended = [*_assistants.values(), *_assistants_of_paths.values()]
            _assistants.clear()
            _assistants_of_paths.clear()
        elif isinstance(draft, PreTrainedModel):
            ended = [_assistants.pop(draft, None)]
        elif isinstance(draft, (str, os.PathLike)):
            path = os.fspath(draft)
            heads = [known.pop(path) for known in _heads.values() if path in known]
            ended = [_assistants_of_paths.pop(path, None), *(_assistants.pop(head, None) for head in heads)]
        else:
            raise TypeError(
                "hf_ssd.close takes the model, folder or hub id that was passed to generate() as `assistant_model`, "
                f"not a {type(draft).__name__}; a DraftAssistant has a close() of its own."
            )
    for assistant in filter(None, ended):
        assistant.close()


def info_of(draft: PreTrainedModel | DraftAssistant | str | os.PathLike) -> DraftInfo:
    """Returns the [`DraftInfo`] of any draft that can be passed as `assistant_model`, without loading it."""
    if isinstance(draft, (str, os.PathLike)):
        draft = _assistants_of_paths.get(os.fspath(draft)) or draft_config(draft, {})
    if isinstance(draft, DraftAssistant):
        model = None if draft.weights is None else draft.weights.model()
        if model is None:
            return draft.info
        draft = model
    return DraftInfo.of(draft.config if isinstance(draft, PreTrainedModel) else draft)
