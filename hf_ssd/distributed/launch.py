"""Draft workers beside a single-process program."""

import functools
import json
import os

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .. import devices as accelerators
from ..cache.compiled import is_compiled
from ..cache.support import without_wrapper
from ..drafting.resolver import for_worker
from .assistant import DraftAssistant
from .child import Child, check_system
from .cores import CoreShare, divide_cores
from .meeting import private_meeting
from .rebuilding import check_weights
from .shared_weights import SharedWeights
from .worker_process import WorkerProcess

logger = logging.get_logger(__name__)

START_TIMEOUT = 600.0  # seconds for the worker to import its libraries and load the model


def launch_draft(
    model: PreTrainedModel | str | os.PathLike,
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
            of the available cores, at least 1. A worker that takes turns with the target has the cores of both.
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
    if not isinstance(model, (PreTrainedModel, str, os.PathLike)):
        kind = type(model).__name__
        raise TypeError(f"hf_ssd.launch_draft takes a transformers model, or a folder or hub id, not a {kind}.")
    if devices is not None and (device is not None or not devices):
        raise ValueError("`devices` takes the place of `device`, and lists one device for each worker.")
    devices = [device_for(model, device)] if devices is None else [accelerators.existing(one) for one in devices]
    settings = worker_settings(model, dtype, compile, load_options)
    type_ = None if dtype is None or dtype == "auto" else getattr(torch, str(dtype).removeprefix("torch."))
    on_cpu = [one.type == "cpu" for one in devices]
    if num_threads is not None and not all(on_cpu):
        raise ValueError(f"`num_threads` is for a draft on the CPU; this one is on {devices[on_cpu.index(False)]}.")
    if cores is not None and (num_threads is not None or len(cores.drafts) != sum(on_cpu)):
        raise ValueError("`cores` takes the place of `num_threads`, and lists the cores of each worker on the CPU.")
    if cores is None and any(on_cpu):
        cores = divide_cores(num_threads, sum(on_cpu))
    given, model = model, for_worker(model, target, type_, **settings["load_options"])
    if model is not given:  # a head, which has been loaded
        settings = worker_settings(model, None, compile, load_options)
    weights = SharedWeights(model) if isinstance(model, PreTrainedModel) else None
    return new_assistant(model, weights, devices, cores, {**settings, "timeout": timeout}, wait=True)


def worker_settings(
    model: PreTrainedModel | str | os.PathLike, dtype, compile: bool | None, load_options: dict
) -> dict:
    """Returns the settings that describe the model to a worker, without its device. See [`launch_draft`]."""
    is_loaded = isinstance(model, PreTrainedModel)
    if is_loaded and (load_options or dtype is not None):
        raise ValueError("`dtype` and load options are for a folder or hub id; this draft is already loaded.")
    return {
        "path": None if is_loaded else os.fspath(model),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "compile": is_loaded and is_compiled(model) if compile is None else compile,
        "load_options": {name: _as_json(name, value) for name, value in load_options.items()},
    }


def _as_json(name: str, value):
    """Returns a load option as plain values that can be sent to a worker."""
    if name == "quantization_config" and hasattr(value, "to_dict"):
        value = value.to_dict()
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"`{name}` is a {kind}, which cannot be sent to the worker; give plain values.") from None


def device_for(model: PreTrainedModel | str | os.PathLike, device: str | torch.device | None) -> torch.device:
    if device is not None:
        return accelerators.existing(device)
    if isinstance(model, PreTrainedModel):
        check_weights(model)
        return model.device
    return accelerators.spare_accelerator() or torch.device("cpu")


def new_assistant(
    model: PreTrainedModel | str | os.PathLike,
    weights: SharedWeights | None,
    devices: list[torch.device],
    cores: CoreShare | None,
    settings: dict,
    wait: bool,
) -> DraftAssistant:
    shares = iter(cores.drafts if cores else ())
    workers = []
    for device in devices:
        place = {"device": str(device), "cores": None}
        if device.type == "cpu":
            place |= {"cores": list(next(shares)), "all_cores": list(cores.all), "threads": torch.get_num_threads()}
        launch = functools.partial(start_worker, {**settings, **place}, weights)
        workers.append(WorkerProcess(launch, settings["timeout"]))
    assistant = DraftAssistant(workers, cores, weights, wait=wait)
    assistant.path = settings["path"] or model.config._name_or_path
    if cores is not None:
        logger.info(f"The draft has the CPU cores {cores.drafts}; a target on the CPU has {cores.target}.")
    return assistant


def start_worker(settings: dict, weights: SharedWeights | None = None) -> tuple[Child, dict]:
    """Starts a worker as a child of this process, and returns the child and the place where it meets this process."""
    meeting, descriptors = private_meeting()
    settings = {**settings, "meeting": meeting, "weights": None}
    if weights is not None:
        weights.fill()
        settings["weights"], descriptors = weights.description, [*descriptors, weights.descriptor]
    return Child(settings, descriptors), meeting
