"""The drafts that were passed to generate() as models, folders or hub ids, and the workers that it started for them."""

import os
import threading
import weakref

from transformers import PreTrainedModel
from transformers.utils import logging

from ..cache.support import without_wrapper
from ..drafting.resolver import forget
from .assistant import DraftAssistant
from .child import check_system
from .cores import divide_cores
from .launch import START_TIMEOUT, device_for, new_assistant, worker_settings
from .rebuilding import structure_of
from .shared_weights import SharedWeights

logger = logging.get_logger(__name__)

_assistants: "weakref.WeakKeyDictionary[PreTrainedModel, DraftAssistant]" = weakref.WeakKeyDictionary()
_assistants_of_paths: dict[str, DraftAssistant] = {}
_refused: "weakref.WeakKeyDictionary[PreTrainedModel, tuple]" = weakref.WeakKeyDictionary()  # with their structures
_starting = threading.Lock()


def assistant_for(draft: PreTrainedModel | str | os.PathLike, info=None) -> DraftAssistant | None:
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
        device = device_for(draft, None)
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
            ended = [_assistants_of_paths.pop(path, None), *(_assistants.pop(head, None) for head in forget(path))]
        else:
            raise TypeError(
                "hf_ssd.close takes the model, folder or hub id that was passed to generate() as `assistant_model`, "
                f"not a {type(draft).__name__}; a DraftAssistant has a close() of its own."
            )
    for assistant in filter(None, ended):
        assistant.close()
