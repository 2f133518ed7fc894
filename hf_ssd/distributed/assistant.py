"""The draft as users hold it: one or several workers that serve call after call."""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable

import torch
from transformers.utils import logging

from .. import devices
from .connection import Connection
from .cores import CoreShare
from .session import DraftError, DraftSession, SessionRequest
from .several_drafts import SeveralDrafts
from .shared_weights import SharedWeights
from .target_ranks import TargetRanks
from .worker_session import WorkerSession

logger = logging.get_logger(__name__)

SHOWN_AFTER = 2.0  # seconds until a progress bar shows that workers are starting
WAIT_SLICE = 0.1  # seconds; between two slices the bar moves
TURN_POLL = 0.002  # seconds between two looks whether another call has ended
JOIN_TIMEOUT = 5.0  # seconds for a start to notice that its worker was ended


class Turn:
    """
    The right of one call to use the workers. It is made before it is taken, so that its maker can end it wherever an
    interrupt has stopped the taking.

    Attributes:
        thread (`threading.Thread`): The thread of the call.
        workers (`list[Connection]`): Those whose session is not closed.
    """

    def __init__(self):
        self.thread, self.workers = threading.current_thread(), []


class WorkerStart:
    """
    A worker that gets ready in a thread of its own.

    Args:
        start (`Callable`): Starts the worker, and returns a [`Connection`] that is to be connected.

    Attributes:
        worker ([`Connection`], *optional*): The worker, once its process runs.
        error ([`DraftError`], *optional*): Why it cannot start, once that is known.
    """

    def __init__(self, start: Callable[[], Connection]):
        self.start, self.worker, self.error, self.is_cancelled = start, None, None, False
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.worker = self.start()
            if self.is_cancelled:
                self.worker.end()
            self.worker.connect()
        except DraftError as error:
            self.error = error
        except Exception as error:
            self.error = DraftError(f"The draft worker could not be started: {error}")
            self.error.__cause__ = error

    def cancel(self) -> None:
        """Ends the worker, and the thread with it. May be called more than once."""
        self.is_cancelled = True
        if self.worker is not None:
            self.worker.end()
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(JOIN_TIMEOUT)  # it may use the channel
        if self.worker is not None:
            self.worker.kill()


class DraftAssistant:
    """
    One or several draft workers, to be passed as `assistant_model`. Made by [`~hf_ssd.launch_draft`].

    Args:
        starts (`list[Callable]`): For each worker what starts it and returns a [`Connection`] that is to be connected.
        cores ([`CoreShare`], *optional*): How target and draft share the CPU cores, if the draft runs on the CPU.
        weights ([`SharedWeights`], *optional*): The draft's weights, if it was given as a model.
        ranks ([`TargetRanks`], *optional*): The ranks of the target, if there are several. Only the first one starts
            workers and talks to them.
        wait (`bool`, *optional*, defaults to `True`): Whether to wait until all workers are ready. Otherwise they start
            while calls are served by plain decoding.

    Attributes:
        vocab_size (`int`): Of the draft model.
        device (`str`): Where the draft model is, or the first of several.
        workers (`list[Connection]`): The workers.
    """

    def __init__(
        self,
        starts: list[Callable[[], Connection]],
        cores: CoreShare | None = None,
        weights: SharedWeights | None = None,
        ranks: TargetRanks | None = None,
        wait: bool = True,
    ):
        self.starts, self.cores, self.weights = starts, cores, weights
        self.ranks = TargetRanks() if ranks is None else ranks
        self.process = os.getpid()  # a process that is forked from it has no part in this
        self.sessions = 0
        # Calls take turns. A dictionary, because no interrupt divides its `setdefault`.
        self.turn: dict[str, Turn] = {}
        self.closed = False
        self.workers: list[Connection | None] = [None] * len(starts)
        self.starting: dict[int, WorkerStart] = {}
        self.failures: dict[int, DraftError] = {}  # of starts, until a call was told
        self.lost: set[int] = set()  # workers that do not start again
        # If no one closes this, its workers must still end before their channels are collected as garbage.
        self.finalizer = weakref.finalize(self, _end_all, self.process, self.workers, self.starting, weights)
        self.vocab_size = self.device = None
        if not wait:
            self._start(range(len(starts)))
            return
        with self.ranks.one_call():
            info = self.ranks.share_values(self._launch() if self.ranks.is_leader else None)
        self.vocab_size, self.device = info["vocab_size"], info["device"]

    def _launch(self) -> dict:
        """Starts all workers, waits for them, and returns the `worker_info` of the first one."""
        try:
            self._start(range(len(self.starts)))
            bar = {"total": len(self.starts), "desc": "starting the draft", "unit": "worker", "leave": False}
            # Once a second: where there is no terminal, each time is a line of a log.
            with logging.tqdm(**bar, delay=SHOWN_AFTER, mininterval=1.0, miniters=0) as progress:
                while self.starting:
                    before = len(self.starting)
                    self._wait(WAIT_SLICE)
                    if self.failures:
                        raise next(iter(self.failures.values()))
                    progress.update(before - len(self.starting))
        except BaseException:
            self.finalizer()
            raise
        return self.workers[0].worker_info

    # ---------------------------------------------------------------- a call

    def begin_call(self, turn: Turn, timeout: float, patience: float) -> None:
        """
        Takes the turn, after calls of other threads, and starts workers that have ended since the last one again.
        Whatever happens, [`~DraftAssistant.end_call`] must follow.

        Args:
            turn ([`Turn`]): Of this call.
            timeout (`float`): Seconds to wait for calls of other threads.
            patience (`float`): Seconds to wait for workers that are starting.

        Raises:
            `ValueError`: the assistant was closed, or this is called from within a call that it serves.
            [`DraftError`]: another call takes longer than that.
        """
        holder, deadline = self.turn.get("now"), time.monotonic() + timeout
        if holder is not None and holder.thread is turn.thread:
            raise ValueError("This draft assistant serves a call that has not ended; use another one within it.")
        while not self._take(turn):
            if time.monotonic() >= deadline:
                raise DraftError(f"The draft was busy with another call for {timeout:g} s.")
            time.sleep(TURN_POLL)
        if self.closed:
            raise ValueError("This draft assistant was closed; call hf_ssd.launch_draft() again.")
        self._restart()
        self._wait(patience)

    def open_session(
        self, turn: Turn, request: Callable[[], SessionRequest], device: torch.device
    ) -> DraftSession | None:
        """
        Opens a session with the workers that are ready. Returns `None` at once if there are none yet, or another call
        uses them. Then it may be called again.

        Args:
            turn ([`Turn`]): Of this call.
            request (`Callable`): Gives the [`SessionRequest`]. Only asked when a worker is ready.
            device (`torch.device`): Where the target wants to have what it receives.

        Raises:
            [`DraftError`]: no worker starts.
        """
        if not self._take(turn):
            return None
        ready = self._ready()
        if not ready:
            self.end_call(turn)
            return None
        self.sessions += 1
        turn.workers = list(ready)  # each may have half a message from now on, until the session is closed
        request = request()
        arguments = self.sessions, request, turn.workers.clear
        if any(worker.is_on(device) for worker in ready):
            devices.warn_of_sharing(device)
        if request.generation_config.do_sample:
            for worker in ready:
                worker.link_gpus(device)
        if len(ready) == 1 and request.answers_alone:
            return WorkerSession(ready[0], *arguments)
        return SeveralDrafts(ready, *arguments)

    def end_call(self, turn: Turn) -> None:
        """Ends a turn, if it was taken and has not ended, and the workers whose session was not closed."""
        if self.turn.get("now") is not turn or os.getpid() != self.process:
            return
        for worker in turn.workers:
            worker.kill()
        if self.closed:  # while the call was under way
            _end_all(self.process, self.workers, self.starting, self.weights)
        del self.turn["now"]

    def _take(self, turn: Turn) -> bool:
        return self.turn.setdefault("now", turn) is turn

    # ---------------------------------------------------------------- starts

    def _start(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.starting[index] = WorkerStart(self.starts[index])
            self.starting[index].thread.start()

    def _restart(self) -> None:
        """Starts workers that have ended again, except those whose failure no call was told of yet."""
        self._settle()
        ended = {index for index, worker in enumerate(self.workers) if worker is None or not worker.is_alive}
        ended -= self.starting.keys() | self.failures.keys()
        if len(ended) < len(self.workers):
            ended -= self.lost  # the others can do without
        for index in sorted(ended):
            if self.workers[index] is not None:
                self.workers[index].kill()
            logger.warning("The draft worker had ended; starting another one.")
        self._start(sorted(ended))

    def _wait(self, timeout: float) -> None:
        """Waits until no worker is starting, at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        for start in list(self.starting.values()):
            start.thread.join(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
        self._settle()

    def _settle(self) -> None:
        """Takes over the workers whose start is over."""
        for index, start in list(self.starting.items()):
            if start.thread.is_alive():
                continue
            if start.error is not None:
                self.failures[index] = start.error
            else:
                self.workers[index] = start.worker
                if self.weights is not None:
                    self.weights.adopt()
            del self.starting[index]

    def _ready(self) -> list[Connection]:
        """Returns the workers that can serve. Warns if others cannot start; if none can, raises [`DraftError`]."""
        self._settle()
        alive = {index for index, worker in enumerate(self.workers) if worker is not None and worker.is_alive}
        self.lost = (self.lost | self.failures.keys()) - alive
        failures = [self.failures.pop(index) for index in sorted(self.failures)]
        if not alive and not self.starting:
            raise failures[0] if failures else DraftError("The draft worker has ended.")
        for error in failures:
            logger.warning(f"Going on without a draft worker. {error}")
        return [self.workers[index] for index in sorted(alive)]

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """
        Ends the workers. May be called more than once. A call that another thread has under way finishes by plain
        decoding.
        """
        self.closed = True
        if not self.finalizer.alive or os.getpid() != self.process:
            return
        turn = Turn()
        try:
            if self._take(turn):
                for worker in filter(None, self.workers):
                    worker.stop()
                self.finalizer()
            elif self.finalizer.detach():
                for worker in filter(None, self.workers):
                    worker.end()  # the call that uses it closes the rest
        finally:
            self.end_call(turn)

    def __enter__(self) -> "DraftAssistant":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def _end_all(
    process: int, workers: list[Connection | None], starting: dict[int, WorkerStart], weights: SharedWeights | None
) -> None:
    if os.getpid() != process:
        return
    for start in list(starting.values()):
        start.cancel()
    for worker in filter(None, workers):
        worker.kill()
    if weights is not None:
        weights.close()
