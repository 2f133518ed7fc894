"""A draft worker beside a single-process program."""

import os
import threading
import weakref

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .client import WorkerSession
from .cores import CoreShare, divide_cores
from .process import WorkerProcess
from .session import SessionRequest
from .weights import SharedWeights

logger = logging.get_logger(__name__)

START_TIMEOUT = 600.0  # seconds for the worker to import its libraries and load the model


class DraftAssistant:
    """
    A draft worker, to be passed as `assistant_model`. Made by [`launch_draft`].

    Attributes:
        vocab_size (`int`): Of the draft model.
        device (`str`): Where the draft model is.
        cores ([`CoreShare`], *optional*): How target and draft share the CPU cores, if the draft runs on the CPU.
        worker ([`WorkerProcess`]): The process.
    """

    def __init__(self, settings: dict, weights: SharedWeights | None, cores: CoreShare | None):
        self.settings, self.weights, self.cores = settings, weights, cores
        self.sessions = 0
        self.turn = threading.Lock()  # calls to one worker take turns
        self.closed = False
        self.worker = self._start()
        self.vocab_size, self.device = self.worker.facts["vocab_size"], self.worker.facts["device"]

    def _start(self) -> WorkerProcess:
        if self.weights is None:
            return WorkerProcess({**self.settings, "weights": None})
        return WorkerProcess({**self.settings, "weights": self.weights.to_dict()}, self.weights.descriptor)

    def open_session(self, request: SessionRequest) -> WorkerSession:
        """
        Starts a generate() call, after the calls of other threads. If the worker has ended since the last one, a new
        one is started first.

        Raises:
            `ValueError`: the assistant was closed.
            [`DraftError`]: the worker does not start.
        """
        if self.closed:
            raise ValueError("This draft assistant was closed; call hf_ssd.launch_draft() again.")
        self.turn.acquire()
        try:
            if not self.worker.is_alive:
                self.worker.kill()
                logger.warning("The draft worker had ended; starting another one.")
                self.worker = self._start()
            self.sessions += 1
            return WorkerSession(self.worker, self.sessions, request, on_close=self.turn.release)
        except BaseException:
            self.worker.kill()  # it may have half a message
            self.turn.release()
            raise

    def close(self) -> None:
        """Ends the worker. May be called more than once."""
        if self.closed:
            return
        self.closed = True
        self.worker.stop()
        if self.weights is not None:
            self.weights.close()

    def __enter__(self) -> "DraftAssistant":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def launch_draft(
    model: PreTrainedModel | str | os.PathLike,
    device: str | torch.device | None = None,
    num_threads: int | None = None,
    dtype: str | torch.dtype | None = None,
    timeout: float = START_TIMEOUT,
    **load_options,
) -> DraftAssistant:
    """
    Starts a draft worker: a process of its own that drafts while the target verifies.

    ```python
    with hf_ssd.launch_draft("Qwen/Qwen3-0.6B", device="cuda:1") as assistant:
        target.generate(**inputs, assistant_model=assistant, ssd_config=hf_ssd.SSDConfig())
    ```

    Args:
        model (`PreTrainedModel`, `str` or `os.PathLike`):
            The draft: a folder or hub id, which only the worker loads, or a model. A model on the CPU is not copied:
            its weights move to memory that both processes share.
        device (`str` or `torch.device`, *optional*):
            Where the worker drafts. Defaults to the model's device; for a folder or hub id to the last GPU, or the CPU.
        num_threads (`int`, *optional*):
            Cores for a draft on the CPU. Defaults to a quarter of the available ones, at least one; the target has the
            rest for the length of each call.
        dtype (`str` or `torch.dtype`, *optional*):
            Of a draft loaded from a folder or hub id. Defaults to what its config says.
        timeout (`float`, *optional*, defaults to 600):
            Seconds until the worker must be ready.
        load_options:
            Passed on to `AutoModelForCausalLM.from_pretrained`; values must be plain (they travel as JSON).

    Returns:
        [`DraftAssistant`]: A context manager. Without `with`, call `close()`, or let the program's end do it.

    Raises:
        `ValueError`: an argument makes no sense.
        [`DraftError`]: the worker did not start, for example because the path does not load.
    """
    if isinstance(model, PreTrainedModel):
        if load_options or dtype is not None:
            raise ValueError("`dtype` and load options are for a folder or hub id; this draft is already loaded.")
        device = model.device if device is None else device
    elif device is None:
        device = f"cuda:{torch.cuda.device_count() - 1}" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type != "cpu" and num_threads is not None:
        raise ValueError(f"`num_threads` is for a draft on the CPU; this one is on {device}.")
    cores = divide_cores(num_threads) if device.type == "cpu" else None
    settings = {
        "path": None if isinstance(model, PreTrainedModel) else os.fspath(model),
        "device": str(device),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "load_options": load_options,
        "cores": cores and list(cores.draft),
        "timeout": timeout,
    }
    weights = SharedWeights(model) if isinstance(model, PreTrainedModel) else None
    assistant = DraftAssistant(settings, weights, cores)
    if cores is not None:
        logger.info(f"The draft worker has the CPU cores {cores.draft}; a target on the CPU has {cores.target}.")
    return assistant


def assistant_for(model: PreTrainedModel) -> DraftAssistant:
    """Returns the worker for a draft model that was passed as an object: started once, reused, ended with the model."""
    with _starting:
        assistant = _assistants.get(model)
        if assistant is None:
            assistant = _assistants[model] = launch_draft(model)
            weakref.finalize(model, assistant.close)
        return assistant


_assistants: "weakref.WeakKeyDictionary[PreTrainedModel, DraftAssistant]" = weakref.WeakKeyDictionary()
_starting = threading.Lock()
