"""The draft as users hold it: one or several workers that serve call after call."""

import contextlib
import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Callable

import torch
from transformers.utils import logging

from .. import devices
from ..drafting.draft_info import DraftInfo
from ..drafting.request import SessionRequest
from .cores import CoreShare
from .requests import raised_as
from .sessions import DraftError, DraftSession, WorkerSession
from .several_drafts import SeveralDrafts
from .target_ranks import TargetRanks
from .weights import SharedWeights
from .worker_process import WorkerProcess

logger = logging.get_logger(__name__)

SHOWN_AFTER = 2.0  # seconds until a progress bar appears
WAIT_SLICE = 0.1  # seconds between two updates of the progress bar


class DraftAssistant(contextlib.AbstractContextManager["DraftAssistant"]):
    """
    One or several draft workers, to be passed as `assistant_model`. Made by [`~hf_ssd.launch_draft`]. They serve calls
    from any threads, and of any targets, at the same time.

    Attributes:
        info ([`~hf_ssd.drafting.draft_info.DraftInfo`]): Vocabulary size and other facts about the draft model.
        path (`str`, *optional*): The folder or hub id that the draft was loaded from.
        device (`str`): Device of the draft model, or of the first of several workers.
        restarts (`int`): How often a worker that had ended was started again.
    """

    def __init__(
        self,
        workers: list[WorkerProcess],  # are started here
        cores: CoreShare | None = None,  # if the draft runs on the CPU
        weights: SharedWeights | None = None,  # of a draft that was given as a model
        ranks: TargetRanks | None = None,  # of the target; only the first rank starts workers and talks to them
        wait: bool = True,  # until all workers are ready; otherwise calls are served by plain decoding meanwhile
    ):
        self.workers, self.cores, self.weights = workers, cores, weights
        self.ranks = TargetRanks() if ranks is None else ranks
        self.process = os.getpid()  # a forked child does not own the workers
        self.restarts = self.sessions = 0  # session 0 is that of messages that belong to no call
        # Of whoever starts or ends workers, or copies weights for them. An interrupted thread may take it again.
        self.lock = threading.RLock()
        self.closed = False
        # If the user does not call `close`, the workers must still end before their channels are collected as garbage.
        self.finalizer = weakref.finalize(self, _end_all, self.process, workers, weights)
        self.info: DraftInfo | None = None
        self.device = self.path = None
        for worker in workers:
            worker.begin()
        if wait:
            with self.ranks.one_call():
                info = self.ranks.share_values(self._launched() if self.ranks.is_leader else None)
            self.info, self.device = DraftInfo(**info["draft"]), info["device"]

    @property
    def config(self):
        """Raises `ValueError`: transformers reads this if the target was not prepared by [`~hf_ssd.enable`]."""
        raise ValueError(
            "A DraftAssistant drafts for a model that hf_ssd.enable(model) has prepared: call that once, and then "
            "model.generate(..., assistant_model=assistant, ssd_config=hf_ssd.SSDConfig())."
        )

    @property
    def positions(self) -> int | None:
        """Number of positions that the draft supports, or `None` if it has no limit or no worker is ready."""
        return next((worker.worker_info["draft"]["positions"] for worker in self.workers if worker.is_ready), None)

    @property
    def state(self) -> str:
        """State of the draft: `"ready"`, `"starting"`, or `"ended"` until a call starts it again."""
        if any(worker.is_ready for worker in self.workers):
            return "ready"
        return "starting" if any(worker.is_starting for worker in self.workers) else "ended"

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.state
        pids = [worker.worker_info.get("pid") for worker in self.workers if worker.is_ready]
        return f"DraftAssistant({self.path!r}, device={self.device!r}, state={state!r}, processes={pids})"

    def _launched(self) -> dict:
        """Waits for all workers, and returns the `worker_info` of the first worker."""
        bar = {"total": len(self.workers), "desc": "starting the draft", "unit": "worker", "leave": False}
        try:
            # Once a second, because each update is a line of the log where there is no terminal.
            with logging.tqdm(**bar, delay=SHOWN_AFTER, mininterval=1.0, miniters=0) as progress:
                is_starting, shown = True, 0
                while is_starting:
                    is_starting = any(worker.is_starting for worker in self.workers)
                    ready = len(self._wait(WAIT_SLICE))
                    progress.update(ready - shown)
                    shown = ready
                    for worker in self.workers:
                        if worker.error is not None:
                            raise worker.take_error()
        except BaseException:
            self.finalizer()
            raise
        return self.workers[0].worker_info

    def begin_call(self, patience: float) -> None:
        """Restarts workers that have ended, and waits up to `patience` seconds for those that start."""
        with self.lock:
            if self.closed:
                raise ValueError("This draft assistant was closed; call hf_ssd.launch_draft() again.")
            if self.weights is not None and not self.weights.fits():  # its layers, shapes or dtypes have changed
                for worker in self.workers:
                    worker.cancel()
                self.workers[:] = [WorkerProcess(one.launch, one.timeout) for one in self.workers]
                self.weights.lay_out()
            self._restart()
        self._wait(patience)

    def open_session(self, request: Callable[[], SessionRequest], device: torch.device) -> DraftSession | None:
        """Returns a session with the ready workers, which is to begin; `None` at once if none is ready yet."""
        with self.lock:
            workers = self._ready()
            if not workers:
                return None
            request = dataclasses.replace(request(), weights_version=self._current_weights())
            accelerators = {worker.worker_info["identity"] for worker in workers} - {None}
            if accelerators and devices.identity(device) in accelerators:
                devices.warn_of_sharing(device)
            kind, of_call = (WorkerSession, workers[0]) if len(workers) == 1 else (SeveralDrafts, workers)
            self.sessions += 1
            return kind(of_call, self.sessions, request)

    def _current_weights(self) -> int:
        """Copies the draft's current weights for the workers, and returns their version."""
        if self.weights is None:
            return 0
        if any(worker.is_starting for worker in self.workers):
            return self.weights.version  # the weights must not change while a starting worker tries its model
        with raised_as(DraftError, "The draft's weights could not be copied for its worker:"):
            return self.weights.fill()

    def _restart(self) -> None:
        """Restarts workers that have ended, unless their failure was not reported yet, or the other workers suffice."""
        ended = [worker for worker in self.workers if not (worker.is_starting or worker.is_alive or worker.error)]
        for worker in ended:
            if not worker.is_lost or len(ended) == len(self.workers):
                logger.warning("The draft worker had ended; starting another one.")
                self.restarts += 1
                worker.begin()

    def _wait(self, timeout: float) -> list[WorkerProcess]:
        """Waits until no worker is starting, at most `timeout` seconds, and returns the workers that are ready."""
        deadline = time.monotonic() + timeout
        for worker in self.workers:
            if worker.is_starting:
                worker.thread.join(min(deadline - time.monotonic(), threading.TIMEOUT_MAX))
        return [worker for worker in self.workers if worker.is_ready]

    def _ready(self) -> list[WorkerProcess]:
        """Returns the ready workers and warns of failed starts. If none is ready or starting, raises [`DraftError`]."""
        starting = [one for one in self.workers if one.is_starting]  # read first: a worker may become ready meanwhile
        ready = self._wait(0.0)
        errors = [one.take_error() for one in self.workers if one.error is not None and one not in starting]
        if not ready and not starting:
            raise errors.pop(0) if errors else DraftError("The draft worker has ended.")  # held by no variable
        for error in errors:
            logger.warning(f"Going on without a draft worker. {error}")
        return ready

    def close(self) -> None:
        """
        Ends the workers. May be called more than once. If another thread is in a call, that call finishes by plain
        decoding.
        """
        self.closed = True
        if self.finalizer.alive and os.getpid() == self.process:
            with self.lock:
                self.finalizer()

    def __exit__(self, *exception) -> None:
        self.close()


def _end_all(process: int, workers: list[WorkerProcess], weights: SharedWeights | None) -> None:
    if os.getpid() == process:
        for worker in workers:
            worker.cancel()
        if weights is not None:
            weights.close()
