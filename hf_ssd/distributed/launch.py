"""Draft workers beside a single-process program."""

import functools
import os
import threading
import weakref

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .. import devices as accelerators
from ..cache.compiled import is_compiled
from ..drafting.parallel_drafter import mask_token
from .assistant import DraftAssistant
from .connection import Connection
from .cores import CoreShare, divide_cores
from .meeting import private_meeting
from .process import WorkerProcess
from .shared_weights import SharedWeights

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
    **load_options,
) -> DraftAssistant:
    """
    Starts a draft worker: a process of its own that drafts while the target verifies. Or several of them, each of which
    prepares a share of the outcomes.

    ```python
    with hf_ssd.launch_draft("Qwen/Qwen3-0.6B", device="cuda:1") as assistant:
        target.generate(**inputs, assistant_model=assistant, ssd_config=hf_ssd.SSDConfig())
    ```

    Args:
        model (`PreTrainedModel`, `str` or `os.PathLike`):
            The draft: a folder or hub id, which only the worker loads, or a model. A model on the CPU is not copied:
            its weights move to memory that all processes share.
        device (`str` or `torch.device`, *optional*):
            Where the worker drafts. Defaults to the model's device; for a folder or hub id to the last accelerator on
            which this process holds nothing yet (so load the target first), or the CPU.
        num_threads (`int`, *optional*):
            Cores for a draft on the CPU. Defaults to a quarter of the available ones, at least one; the target has the
            rest for the length of each call. Several workers on the CPU have that many each.
        dtype (`str` or `torch.dtype`, *optional*):
            Of a draft loaded from a folder or hub id. Defaults to what its config says.
        timeout (`float`, *optional*, defaults to 600):
            Seconds until the worker must be ready.
        devices (`list`, *optional*):
            Instead of `device`, one for each of several workers, for example `["cuda:1", "cuda:2"]`. A `budget` is then
            what each of them prepares.
        cores ([`~hf_ssd.distributed.cores.CoreShare`], *optional*):
            Which CPU cores each side gets, instead of `num_threads` of them.
        compile (`bool`, *optional*):
            Whether the worker compiles the draft with `torch.compile`, which takes up to a minute at its start.
            Defaults to whether the model that was given is compiled. Where there is no compiler, the draft runs
            without.
        load_options:
            Passed on to `AutoModelForCausalLM.from_pretrained`; values must be plain (they travel as JSON).

    Returns:
        [`DraftAssistant`]: A context manager. Without `with`, call `close()`, or let the program's end do it.

    Raises:
        `ValueError`: an argument makes no sense.
        [`DraftError`]: a worker did not start, for example because the path does not load.
    """
    if devices is not None and (device is not None or not devices):
        raise ValueError("`devices` takes the place of `device`, and lists one device for each worker.")
    devices = [_device_for(model, device)] if devices is None else [torch.device(one) for one in devices]
    on_cpu = [one.type == "cpu" for one in devices]
    if num_threads is not None and not all(on_cpu):
        raise ValueError(f"`num_threads` is for a draft on the CPU; this one is on {devices[on_cpu.index(False)]}.")
    if cores is not None and (num_threads is not None or len(cores.drafts) != sum(on_cpu)):
        raise ValueError("`cores` takes the place of `num_threads`, and lists the cores of each worker on the CPU.")
    if cores is None and any(on_cpu):
        cores = divide_cores(num_threads, sum(on_cpu))
    settings = {**worker_settings(model, dtype, compile, load_options), "timeout": timeout}
    return _assistant(model, devices, cores, settings, wait=True)


def worker_settings(
    model: PreTrainedModel | str | os.PathLike, dtype, compile: bool | None, load_options: dict
) -> dict:
    """Returns what a worker is told of the model, except where it is to be. See [`launch_draft`]."""
    is_loaded = isinstance(model, PreTrainedModel)
    if is_loaded and (load_options or dtype is not None):
        raise ValueError("`dtype` and load options are for a folder or hub id; this draft is already loaded.")
    return {
        "path": None if is_loaded else os.fspath(model),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "compile": is_loaded and is_compiled(model) if compile is None else compile,
        "load_options": load_options,
    }


def _device_for(model: PreTrainedModel | str | os.PathLike, device: str | torch.device | None) -> torch.device:
    if device is None and isinstance(model, PreTrainedModel):
        return model.device
    return torch.device(accelerators.spare_accelerator() or "cpu" if device is None else device)


def _assistant(
    model: PreTrainedModel | str | os.PathLike,
    devices: list[torch.device],
    cores: CoreShare | None,
    settings: dict,
    wait: bool,
) -> DraftAssistant:
    weights = SharedWeights(model) if isinstance(model, PreTrainedModel) else None
    shares = iter(cores.drafts if cores else ())
    starts = []
    for device in devices:
        place = {"device": str(device), "cores": list(next(shares)) if device.type == "cpu" else None}
        starts.append(functools.partial(start_worker, {**settings, **place}, weights))
    assistant = DraftAssistant(starts, cores, weights, wait=wait)
    assistant.path = settings["path"] or model.config._name_or_path
    if cores is not None:
        logger.info(f"The draft has the CPU cores {cores.drafts}; a target on the CPU has {cores.target}.")
    return assistant


def start_worker(settings: dict, weights: SharedWeights | None = None) -> Connection:
    """Starts a process of this one's own, and returns the worker, which is to be connected."""
    meeting, descriptors = private_meeting()
    settings = {**settings, "meeting": meeting, "weights": None}
    if weights is not None:
        weights.fill()
        settings["weights"], descriptors = weights.description, [*descriptors, weights.descriptor]
    return Connection(WorkerProcess(settings, descriptors), meeting, settings["timeout"])


def assistant_for(model: PreTrainedModel) -> DraftAssistant:
    """
    Returns the worker for a draft model that was passed as an object. Each process starts one, does not wait for it,
    uses it again, and ends it with the model. It is replaced when the model's embeddings were resized.
    """
    with _starting:
        assistant = _assistants.get(model)
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        if assistant is not None and assistant.process == os.getpid():
            if assistant.vocab_size == vocab_size:
                return assistant
            assistant.close()
        cores = divide_cores() if model.device.type == "cpu" else None
        settings = {**worker_settings(model, None, None, {}), "timeout": START_TIMEOUT}
        assistant = _assistants[model] = _assistant(model, [model.device], cores, settings, wait=False)
        assistant.vocab_size, assistant.device = vocab_size, str(model.device)
        assistant.pard_token = mask_token(model.config)
        weakref.finalize(model, assistant.close)
        return assistant


_assistants: "weakref.WeakKeyDictionary[PreTrainedModel, DraftAssistant]" = weakref.WeakKeyDictionary()
_starting = threading.Lock()
