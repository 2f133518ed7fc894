"""The draft as users hold it: one or several workers that serve call after call."""

import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Callable

import torch
from transformers.utils import logging

from .. import devices
from ..drafting.needs import DraftInfo
from .connection import Connection
from .cores import CoreShare
from .session import DraftError, DraftSession, SessionRequest
from .several_drafts import SeveralDrafts
from .shared_weights import SharedWeights
from .target_ranks import TargetRanks
from .worker_session import WorkerSession
from .worker_slot import WorkerSlot

logger = logging.get_logger(__name__)

SHOWN_AFTER = 2.0  # seconds until a progress bar shows that workers are starting
WAIT_SLICE = 0.1  # seconds; between two slices the bar moves
TURN_POLL = 0.002  # seconds between two looks whether another call has ended


class Turn:
    """
    The right of one call to use the workers. It is made before it is taken, so that its maker can end it wherever an
    interrupt has stopped the taking.
    """

    def __init__(self):
        self.thread = threading.current_thread()
        self.workers: list[Connection] = []  # those whose session is not closed


class DraftAssistant:
    """
    One or several draft workers, to be passed as `assistant_model`. Made by [`~hf_ssd.launch_draft`].

    Args:
        starts (`list[Callable]`): For each worker what starts it and returns a [`Connection`] that is to be connected.
        cores ([`CoreShare`], *optional*): How target and draft share the CPU cores, if the draft runs on the CPU.
        weights ([`SharedWeights`], *optional*): A copy of the draft's weights, if it was given as a model.
        ranks ([`TargetRanks`], *optional*): The ranks of the target, if there are several. Only the first one starts
            workers and talks to them.
        wait (`bool`, *optional*, defaults to `True`): Whether to wait until all workers are ready. Otherwise they start
            while calls are served by plain decoding.

    Attributes:
        info ([`~hf_ssd.drafting.needs.DraftInfo`]): What is known of the draft model.
        path (`str`, *optional*): The folder or hub id that it was loaded from.
        device (`str`): Where the draft model is, or the first of several.
        workers (`list[Connection]`): The workers.
        restarts (`int`): How often a worker that had ended was started again.
    """

    def __init__(
        self,
        starts: list[Callable[[], Connection]],
        cores: CoreShare | None = None,
        weights: SharedWeights | None = None,
        ranks: TargetRanks | None = None,
        wait: bool = True,
    ):
        self.slots = [WorkerSlot(start) for start in starts]
        self.cores, self.weights = cores, weights
        self.ranks = TargetRanks() if ranks is None else ranks
        self.process = os.getpid()  # a process that is forked from it has no part in this
        self.sessions = self.restarts = 0
        # Calls take turns. A dictionary, because no interrupt divides its `setdefault`.
        self.turn: dict[str, Turn] = {}
        self.closed = False
        # If no one closes this, its workers must still end before their channels are collected as garbage.
        self.finalizer = weakref.finalize(self, _end_all, self.process, self.slots, weights)
        self.info: DraftInfo | None = None
        self.device = self.path = None
        if not wait:
            for slot in self.slots:
                slot.begin()
            return
        with self.ranks.one_call():
            info = self.ranks.share_values(self._launch() if self.ranks.is_leader else None)
        self.info, self.device = DraftInfo(**info["draft"]), info["device"]

    @property
    def config(self):
        """What transformers asks a draft model for, where [`~hf_ssd.enable`] was forgotten."""
        raise ValueError(
            "A DraftAssistant drafts for a model that hf_ssd.enable(model) has prepared: call that once, and then "
            "model.generate(..., assistant_model=assistant, ssd_config=hf_ssd.SSDConfig())."
        )

    @property
    def workers(self) -> list[Connection | None]:
        return [slot.worker for slot in self.slots]

    @property
    def positions(self) -> int | None:
        """How many positions the draft has, if it is ready and has no more."""
        infos = [slot.worker.worker_info for slot in self.slots if slot.is_ready]
        return infos[0]["draft"]["positions"] if infos else None

    @property
    def vocab_size(self) -> int:
        """Number of the draft model's tokens."""
        return self.info.vocab_size

    @property
    def pard_token(self) -> int | None:
        """The mask token of a parallel draft."""
        return self.info.mask_token

    @property
    def state(self) -> str:
        """Whether there is a draft: `"ready"`, `"starting"`, or `"ended"` until a call starts it again."""
        if any(slot.is_ready for slot in self.slots):
            return "ready"
        return "starting" if any(slot.is_starting for slot in self.slots) else "ended"

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.state
        pids = [slot.worker.worker_info.get("pid") for slot in self.slots if slot.is_ready]
        return f"DraftAssistant({self.path!r}, device={self.device!r}, state={state!r}, processes={pids})"

    def _launch(self) -> dict:
        """Starts all workers, waits for them, and returns the `worker_info` of the first one."""
        bar = {"total": len(self.slots), "desc": "starting the draft", "unit": "worker", "leave": False}
        try:
            for slot in self.slots:
                slot.begin()
            # Once a second: where there is no terminal, each time is a line of a log.
            with logging.tqdm(**bar, delay=SHOWN_AFTER, mininterval=1.0, miniters=0) as progress:
                is_starting, shown = True, 0
                while is_starting:
                    is_starting = any(slot.is_starting for slot in self.slots)
                    ready = len(self._wait(WAIT_SLICE))
                    for slot in self.slots:
                        if slot.error is not None:
                            raise slot.take_error()
                    progress.update(ready - shown)
                    shown = ready
        except BaseException:
            self.finalizer()
            raise
        return self.workers[0].worker_info

    # ---------------------------------------------------------------- a call

    def begin_call(self, turn: Turn, timeout: float, patience: float) -> None:
        """
        Takes the turn, after calls of other threads, for which it waits `timeout` seconds. Starts workers that have
        ended again, and waits `patience` seconds for them. Whatever happens, [`~DraftAssistant.end_call`] must follow.

        Raises:
            `ValueError`: the assistant was closed, or this is called from within a call that it serves.
            [`DraftError`]: the call of another thread takes too long.
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
        self._look_at_layers()
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
            request (`Callable`): Gives the [`SessionRequest`]. Only called when a worker is ready.
            device (`torch.device`): The target's device.

        Raises:
            [`DraftError`]: no worker starts, or the weights cannot be copied.
        """
        if not self._take(turn):
            return None
        workers = self._ready()
        if not workers:
            self.end_call(turn)
            return None
        self.sessions += 1
        turn.workers = list(workers)  # each may have half a message from now on, until the session is closed
        request = dataclasses.replace(request(), weights_version=self._current_weights())
        arguments = self.sessions, request, turn.workers.clear
        if any(worker.is_on(device) for worker in workers):
            devices.warn_of_sharing(device)
        if request.generation_config.do_sample:
            for worker in workers:
                worker.link_gpus(device)
        if len(workers) == 1 and request.answers_alone:
            return WorkerSession(workers[0], *arguments)
        return SeveralDrafts(workers, *arguments)

    def end_call(self, turn: Turn) -> None:
        """Ends a turn, if it was taken and has not ended, and the workers whose session was not closed."""
        if self.turn.get("now") is not turn or os.getpid() != self.process:
            return
        for worker in turn.workers:
            worker.kill()
        if self.closed:  # while the call was under way
            _end_all(self.process, self.slots, self.weights)
        del self.turn["now"]

    def _take(self, turn: Turn) -> bool:
        return self.turn.setdefault("now", turn) is turn

    def _look_at_layers(self) -> None:
        """Ends the workers of a draft that has other layers, shapes or dtypes now, so that others are started."""
        if self.weights is None or self.weights.fits():
            return
        for slot in self.slots:
            slot.end()
        self.slots[:] = [WorkerSlot(slot.start) for slot in self.slots]
        self.weights.lay_out()

    def _current_weights(self) -> int:
        """Lets the workers have the draft's weights as they are now, and returns their version."""
        if self.weights is None:
            return 0
        if any(slot.is_starting for slot in self.slots):
            return self.weights.version  # a worker that is being tried must not see them change
        try:
            return self.weights.fill()
        except Exception as error:
            raise DraftError(f"The draft's weights could not be copied for its worker: {error}") from error

    def _restart(self) -> None:
        """Starts all workers that do not run, except those whose failure no call was told of yet."""
        ended = [slot for slot in self.slots if not (slot.is_starting or slot.is_ready or slot.error)]
        if len(ended) < len(self.slots):
            ended = [slot for slot in ended if not slot.is_lost]  # the others can do without
        for slot in ended:
            if slot.worker is not None:
                slot.worker.kill()
            logger.warning("The draft worker had ended; starting another one.")
            self.restarts += 1
            slot.begin()

    def _wait(self, timeout: float) -> list[Connection]:
        """Waits until no worker is starting, at most `timeout` seconds, and returns those that are ready."""
        deadline = time.monotonic() + timeout
        for slot in self.slots:
            if slot.is_starting:
                slot.thread.join(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
        return [slot.worker for slot in self.slots if slot.is_ready]

    def _ready(self) -> list[Connection]:
        """Returns the workers that are ready. Warns if others cannot start; if none can, raises [`DraftError`]."""
        starting = [slot for slot in self.slots if slot.is_starting]  # asked first: one may be ready by now
        ready, errors = self._wait(0.0), []
        for slot in self.slots:
            has_failed = slot.error is not None and slot not in starting
            slot.is_lost = not slot.is_ready and (slot.is_lost or has_failed)
            if has_failed:
                errors.append(slot.take_error())
        if not ready and not starting:
            raise errors.pop(0) if errors else DraftError("The draft worker has ended.")  # no variable holds it then
        for error in errors:
            logger.warning(f"Going on without a draft worker. {error}")
        return ready

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
                for slot in self.slots:
                    if slot.is_ready:
                        slot.worker.stop()
                self.finalizer()
            elif self.finalizer.detach():
                for slot in self.slots:
                    if slot.worker is not None:
                        slot.worker.end()  # the call that uses it closes the rest
        finally:
            self.end_call(turn)

    def __enter__(self) -> "DraftAssistant":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def _end_all(process: int, slots: list[WorkerSlot], weights: SharedWeights | None) -> None:
    if os.getpid() == process:
        for slot in slots:
            slot.end()
        if weights is not None:
            weights.close()
