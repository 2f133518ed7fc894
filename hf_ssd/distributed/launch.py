"""Draft workers beside a single-process program: those of launch_draft, and those of drafts passed to generate()."""

import functools
import json
import os
import threading
import weakref

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .. import devices as accelerators
from ..cache.compiled import is_compiled
from ..cache.support import without_wrapper
from ..drafting.resolver import for_worker, forget
from .assistant import DraftAssistant
from .cores import CoreShare, divide_cores
from .weights import SharedWeights, structure_of
from .worker_process import Child, WorkerProcess, check_system

logger = logging.get_logger(__name__)

START_TIMEOUT = 600.0  # seconds for the worker to import its libraries and load the model
Draft = PreTrainedModel | str | os.PathLike

# The assistants of drafts that were passed to generate(), and the structures of models that no worker can rebuild.
_assistants: "weakref.WeakKeyDictionary[PreTrainedModel, DraftAssistant]" = weakref.WeakKeyDictionary()
_assistants_of_paths: dict[str, DraftAssistant] = {}
_refused: "weakref.WeakKeyDictionary[PreTrainedModel, tuple]" = weakref.WeakKeyDictionary()
_starting = threading.Lock()


def launch_draft(
    model: Draft,
    device: str | torch.device | None = None,
    num_threads: int | None = None,
    dtype: str | torch.dtype | None = None,
    timeout: float = START_TIMEOUT,
    devices: list[str | torch.device] | None = None,
    cores: CoreShare | None = None,
    compile: bool | None = None,
    target: PreTrainedModel | None = None,
    **load_options,
) -> DraftAssistant:
    """
    Starts a draft worker, a separate process that drafts while the target verifies, or several draft workers, each of
    which prepares a share of the outcomes.

    ```python
    with hf_ssd.launch_draft("Qwen/Qwen3-0.6B", device="cuda:1") as assistant:
        target.generate(**inputs, assistant_model=assistant, ssd_config=hf_ssd.SSDConfig())
    ```

    Args:
        model (`PreTrainedModel`, `str` or `os.PathLike`):
            The draft: a folder, GGUF file or hub id, which only the worker loads, or a model, whose weights are copied.
            If the weights have changed since the last call, the next call copies them again.
        device (`str` or `torch.device`, *optional*):
            Where the worker drafts. Defaults to the model's device; for a folder or hub id to the last accelerator on
            which this process holds nothing yet (so load the target first), or the CPU.
        num_threads (`int`, *optional*):
            Cores for each worker on the CPU while it works beside the target, which has the rest. Defaults to a quarter
            of the available cores, at least 1; one worker has half of four or more cores in planned calls if it is
            slow. A worker that takes turns with the target has the cores of both.
        dtype (`str` or `torch.dtype`, *optional*):
            Type of a draft that is loaded from a folder or hub id. Defaults to the type in its config.
        timeout (`float`, *optional*, defaults to 600):
            Seconds until the worker must be ready.
        devices (`list`, *optional*):
            Devices of several workers, instead of `device`, for example `["cuda:1", "cuda:2"]`. A `budget` then counts
            the outcomes that each worker prepares.
        cores ([`~hf_ssd.distributed.cores.CoreShare`], *optional*):
            The CPU cores of each side, instead of `num_threads`.
        compile (`bool`, *optional*):
            Whether the worker compiles the draft with `torch.compile`, which takes up to a minute at its start.
            Defaults to whether `model` is compiled. Where there is no compiler, the draft runs uncompiled.
        target (`PreTrainedModel`, *optional*):
            The model that the draft is for. A head needs it, because it reads its hidden states and may use
            its embedding.
        load_options:
            Passed on to `AutoModelForCausalLM.from_pretrained`: a `quantization_config`, and plain values (they travel
            as JSON).

    Returns:
        [`DraftAssistant`]: A context manager. Without `with`, call `close()`, or let the program's end do it.

    Raises:
        `ValueError`, `TypeError`: an argument makes no sense, there is no such device, folder or hub id, or a worker
            cannot rebuild the model that was given.
        [`DraftError`]: a worker did not start, for example because the weights do not load.
    """
    check_system()
    model = without_wrapper(model)
    if not isinstance(model, Draft):
        kind = type(model).__name__
        raise TypeError(f"hf_ssd.launch_draft takes a transformers model, or a folder or hub id, not a {kind}.")
    if devices is not None and (device is not None or not devices):
        raise ValueError("`devices` takes the place of `device`, and lists one device for each worker.")
    devices = [device_for(model, device)] if devices is None else [accelerators.existing(one) for one in devices]
    settings = worker_settings(model, dtype, compile, load_options, timeout)
    on_cpu = [one.type == "cpu" for one in devices]
    if num_threads is not None and not all(on_cpu):
        raise ValueError(f"`num_threads` is for a draft on the CPU; this one is on {devices[on_cpu.index(False)]}.")
    if cores is not None and (num_threads is not None or len(cores.drafts) != sum(on_cpu)):
        raise ValueError("`cores` takes the place of `num_threads`, and lists the cores of each worker on the CPU.")
    if cores is None and any(on_cpu):
        cores = divide_cores(num_threads, sum(on_cpu))
    type_ = None if dtype is None or dtype == "auto" else getattr(torch, str(dtype).removeprefix("torch."))
    given, model = model, for_worker(model, target, type_, **settings["load_options"])
    if model is not given:  # a head, which has been loaded
        settings = worker_settings(model, None, compile, load_options, timeout)
    return new_assistant(model, devices, cores, settings, wait=True)


def assistant_for(draft: Draft, info=None) -> DraftAssistant | None:
    """Returns the assistant of a draft that was passed to generate(), or `None` for one that no worker can rebuild."""
    is_model = isinstance(draft, PreTrainedModel)
    known, key = (_assistants, draft) if is_model else (_assistants_of_paths, os.fspath(draft))
    with _starting:
        assistant = known.get(key)
        if assistant is not None and assistant.process == os.getpid():
            if not is_model or assistant.weights.fits():
                return assistant
            known.pop(key).close()
        if is_model and _refused.get(draft) == structure_of(draft):
            return None
        try:
            check_system()
            devices = [device_for(draft, None)]
            cores = divide_cores() if devices[0].type == "cpu" else None
            settings = worker_settings(draft, None, None, {})
            assistant = known[key] = new_assistant(draft, devices, cores, settings, wait=False)
        except ValueError as error:
            if not is_model:
                raise
            logger.warning(f"The draft works in turn with the target, in this process. {error}")
            _refused[draft] = structure_of(draft)
            return None
        assistant.info, assistant.device = info, str(devices[0])
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
            models, paths = list(_assistants), list(_assistants_of_paths)
        elif isinstance(draft, PreTrainedModel):
            models, paths = [draft], []
        elif isinstance(draft, (str, os.PathLike)):
            models, paths = forget(os.fspath(draft)), [os.fspath(draft)]
        else:
            raise TypeError(
                "hf_ssd.close takes the model, folder or hub id that was passed to generate() as `assistant_model`, "
                f"not a {type(draft).__name__}; a DraftAssistant has a close() of its own."
            )
        ended = [_assistants.pop(model, None) for model in models]
        ended += [_assistants_of_paths.pop(path, None) for path in paths]
    for assistant in filter(None, ended):
        assistant.close()


def worker_settings(model: Draft, dtype, compile: bool | None, load_options: dict, timeout=START_TIMEOUT) -> dict:
    """Returns the settings that describe the model to a worker, without its device. See [`launch_draft`]."""
    is_loaded = isinstance(model, PreTrainedModel)
    if is_loaded and (load_options or dtype is not None):
        raise ValueError("`dtype` and load options are for a folder or hub id; this draft is already loaded.")
    return {
        "path": None if is_loaded else os.fspath(model),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "compile": is_loaded and is_compiled(model) if compile is None else compile,
        "load_options": {name: _as_json(name, value) for name, value in load_options.items()},
        "timeout": timeout,
    }


def _as_json(name: str, value):
    if name == "quantization_config" and hasattr(value, "to_dict"):
        value = value.to_dict()
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"`{name}` is a {kind}, which cannot be sent to the worker; give plain values.") from None


def device_for(model: Draft, device: str | torch.device | None) -> torch.device:
    if device is not None:
        return accelerators.existing(device)
    if isinstance(model, PreTrainedModel):
        return model.device if model.device.type != "meta" else torch.device("cpu")  # where it is refused
    return accelerators.spare_accelerator() or torch.device("cpu")


def new_assistant(model: Draft, devices: list[torch.device], cores: CoreShare | None, settings: dict, wait: bool):
    weights = SharedWeights(model) if isinstance(model, PreTrainedModel) else None
    shares = iter(cores.drafts if cores else ())
    workers = []
    for device in devices:
        of_worker = {**settings, "device": str(device), "cores": None}
        if device.type == "cpu":
            of_worker["cores"] = {"share": next(shares), "everything": cores.all, "threads": torch.get_num_threads()}
            of_worker["cores"]["half"] = cores.half and cores.half.drafts[0]
        workers.append(WorkerProcess(functools.partial(Child, of_worker, weights), settings["timeout"]))
    assistant = DraftAssistant(workers, cores, weights, wait=wait)
    assistant.path = settings["path"] or model.config._name_or_path
    if cores is not None:
        logger.info(f"The draft has the CPU cores {cores.drafts}; a target on the CPU has {cores.target}.")
    return assistant
