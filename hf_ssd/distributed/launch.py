"""Starts a draft worker beside a single-process program, and never leaves one behind."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.utils import logging

from . import messages
from .channel import Channel, PeerLost
from .cores import CoreShare, divide_cores
from .messages import Kind, Message, ProtocolError
from .session import DraftError, DraftSession, SessionRequest
from .weights import SharedWeights

logger = logging.get_logger(__name__)

START_TIMEOUT = 600.0  # seconds for the worker to import its libraries and load the model
STOP_TIMEOUT = 2.0  # seconds to end by itself before it is killed


class DraftAssistant:
    """
    A draft worker, to be passed as `assistant_model`. Made by [`launch_draft`].

    Attributes:
        vocab_size (`int`): Of the draft model.
        device (`str`): Where the draft model is.
        cores ([`CoreShare`], *optional*): How target and draft share the CPU cores, if the draft runs on the CPU.
        process (`subprocess.Popen`): The worker.
    """

    def __init__(self, settings: dict, weights: SharedWeights | None, cores: CoreShare | None):
        self.settings, self.weights, self.cores = settings, weights, cores
        self.process: subprocess.Popen | None = None
        self.channel: Channel | None = None
        self.sessions = 0
        self.turn = threading.Lock()  # calls to one worker take turns
        self.closed = False
        self._cleanup = None
        self.start()

    def start(self) -> None:
        """
        Starts the process and waits until it has loaded the draft.

        Raises:
            [`DraftError`]: it could not; the worker's own words are in the message.
        """
        self.errors = tempfile.TemporaryFile()
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        descriptors = [self.weights.descriptor] if self.weights is not None else []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
        if self.cores is not None:
            environment["OMP_NUM_THREADS"] = str(len(self.cores.draft))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hf_ssd.distributed.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            pass_fds=descriptors,
            env=environment,
            start_new_session=True,
        )
        self._cleanup = weakref.finalize(self, _end_process, self.process)
        try:
            self._connect(listener, port)
        except BaseException:
            self._kill()
            raise

    def _connect(self, listener: socket.socket, port: int) -> None:
        settings = {**self.settings, "port": port, "weights": self.weights and self.weights.to_dict()}
        self._write_settings(settings)
        timeout = timedelta(seconds=self.settings["timeout"])
        store = dist.TCPStore(
            "127.0.0.1", port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        # The groups below block until the worker joins, so first see it alive and at the store.
        deadline = time.monotonic() + self.settings["timeout"]
        store.set("target", "here")
        while not store.check(["draft"]):
            self._check_alive_until(deadline)
            time.sleep(0.01)
        self.channel = Channel(store, is_target=True)
        while True:
            try:
                ready = self.channel.receive(timeout=0.2)
                break
            except TimeoutError:
                self._check_alive_until(deadline)
            except PeerLost:
                self.process.wait(STOP_TIMEOUT)
        if ready.kind == Kind.ERROR:
            raise DraftError(f"The draft worker could not load its model.\n{messages.payload_to_text(ready.payload)}")
        messages.expect(ready, Kind.READY, 0, 0)
        facts = messages.payload_to_json(ready.payload)
        self.vocab_size, self.device = facts["vocab_size"], facts["device"]

    def _write_settings(self, settings: dict) -> None:
        try:
            self.process.stdin.write(json.dumps(settings).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended already; `_check_alive_until` tells why

    def _check_alive_until(self, deadline: float) -> None:
        if self.process.poll() is not None:
            raise DraftError(f"The draft worker ended while it started.\n{self._last_words()}")
        if time.monotonic() > deadline:
            raise DraftError(f"The draft worker was not ready after {self.settings['timeout']:.0f} s.")

    def _last_words(self) -> str:
        self.errors.seek(0)
        return self.errors.read()[-8000:].decode("utf-8", errors="replace").strip()

    @property
    def is_alive(self) -> bool:
        return self.channel is not None and self.process is not None and self.process.poll() is None

    def open_session(self, request: SessionRequest) -> "WorkerSession":
        """
        Starts a generate() call. If the worker ended since the last call, a new one is started first.

        Raises:
            `ValueError`: the assistant was closed.
            [`DraftError`]: the worker does not start.
        """
        if self.closed:
            raise ValueError("This draft assistant was closed; call hf_ssd.launch_draft() again.")
        self.turn.acquire()
        try:
            if not self.is_alive:
                self._kill()
                logger.warning("The draft worker had ended; starting another one.")
                self.start()
            self.sessions += 1
            return WorkerSession(self, self.sessions, request)
        except BaseException:
            self.turn.release()
            raise

    def close(self) -> None:
        """Ends the worker. May be called more than once."""
        if self.closed:
            return
        self.closed = True
        if self.is_alive:
            self.channel.send(Message(Kind.STOP))
            try:
                self.process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                pass
        self._kill()
        if self.weights is not None:
            self.weights.close()

    def _kill(self) -> None:
        if self._cleanup is not None:
            self._cleanup()
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def __enter__(self) -> "DraftAssistant":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


class WorkerSession(DraftSession):
    """One generate() call's conversation with a worker. Made by [`DraftAssistant.open_session`]."""

    def __init__(self, assistant: DraftAssistant, number: int, request: SessionRequest):
        self.assistant, self.number = assistant, number
        self.batch_size, self.timeout = len(request.prompts), request.config.timeout
        self.round = -1
        self.broken = False
        send = assistant.channel.send
        send(Message(Kind.START, number, payload=messages.json_to_payload(request.to_dict())))
        send(Message(Kind.PROMPTS, number, payload=messages.prompts_to_payload(request.prompts)))

    def send_outcome(self, accepted: torch.LongTensor, bonus: torch.LongTensor) -> None:
        self.round += 1
        payload = messages.outcome_to_payload(accepted, bonus)
        channel = self.assistant.channel
        channel.send(Message(Kind.OUTCOME, self.number, self.round, payload))
        channel.expect()

    def receive_speculation(self) -> tuple[torch.LongTensor, torch.BoolTensor, float]:
        message = self._receive(Kind.SPECULATION)
        tokens, hits, seconds = messages.payload_to_speculation(message.payload, self.batch_size)
        self.shape = (*tokens.shape, self.assistant.vocab_size)
        self.assistant.channel.expect()  # probabilities may arrive while the target computes
        return tokens, hits, seconds

    def receive_probabilities(self) -> torch.FloatTensor:
        return messages.payload_to_probabilities(self._receive(Kind.PROBABILITIES).payload, self.shape)

    def _receive(self, kind: Kind) -> Message:
        deadline = time.monotonic() + self.timeout
        try:
            while True:
                message = self.assistant.channel.receive(max(0.0, deadline - time.monotonic()))
                if message.session == self.number:
                    break  # otherwise it is a late answer to a call that is over
            if message.kind == Kind.ERROR:
                raise DraftError(f"The draft worker raised:\n{messages.payload_to_text(message.payload)}")
            messages.expect(message, kind, self.number, self.round)
            return message
        except TimeoutError:
            self.broken = True
            raise DraftError(f"The draft worker did not answer within {self.timeout:g} s.") from None
        except PeerLost as error:
            self.broken = True
            raise DraftError(f"The draft worker has ended. {self.assistant._last_words()}".strip()) from error
        except ProtocolError as error:
            self.broken = True
            raise DraftError(f"The draft worker sent something unexpected: {error}") from error

    def close(self) -> None:
        try:
            if self.broken:
                self.assistant._kill()
            elif self.assistant.channel is not None:
                self.assistant.channel.send(Message(Kind.END, self.number))
        finally:
            self.assistant.turn.release()


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


def _end_process(process: subprocess.Popen) -> None:
    """Runs when the assistant is closed or collected, and at the latest when the program ends."""
    process.stdin.close()
    try:
        process.wait(0 if process.poll() is not None else 0.05)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
