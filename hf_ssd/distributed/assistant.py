"""The draft as users hold it: one or several workers that serve call after call."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator

import torch
from transformers.utils import logging

from .. import devices
from .client import WorkerSession
from .connection import Connection
from .cores import CoreShare
from .session import DraftError, DraftSession, SessionRequest
from .target_ranks import TargetRanks
from .team import TeamSession

logger = logging.get_logger(__name__)

SHOWN_AFTER = 2.0  # seconds until a progress bar shows that workers are starting


class DraftAssistant:
    """
    One or several draft workers, to be passed as `assistant_model`. Made by [`~hf_ssd.launch_draft`].

    Args:
        starts (`list[Callable]`): For each worker what starts it and returns a [`Connection`] that is to be connected.
        cores ([`CoreShare`], *optional*): How target and draft share the CPU cores, if the draft runs on the CPU.
        on_close (`Callable`, *optional*): Called once, when the assistant is closed.
        ranks ([`TargetRanks`], *optional*): The ranks of the target, if there are several. Only the first one starts
            workers and talks to them.

    Attributes:
        vocab_size (`int`): Of the draft model.
        device (`str`): Where the draft model is, or the first of several.
        workers (`list[Connection]`): The workers.
    """

    def __init__(
        self,
        starts: list[Callable[[], Connection]],
        cores: CoreShare | None = None,
        on_close: Callable[[], None] = lambda: None,
        ranks: TargetRanks | None = None,
    ):
        self.starts, self.cores, self.on_close = starts, cores, on_close
        self.ranks = TargetRanks() if ranks is None else ranks
        self.sessions = 0
        self.turn = threading.Lock()  # calls to the same workers take turns
        self.in_use_by: int | None = None  # the thread whose turn it is
        self.closed = False
        self.workers: list[Connection] = []
        self.lost: set[int] = set()  # which of them do not start again
        # If no one closes this, its workers must still end before their channels are collected as garbage.
        self.finalizer = weakref.finalize(self, _end_all, self.workers, on_close)
        with self.ranks.one_call():
            facts = self.ranks.share_values(self._start_all() if self.ranks.is_leader else None)
        self.vocab_size, self.device = facts["vocab_size"], facts["device"]

    def _start_all(self) -> dict:
        """Returns what the first worker says of its model."""
        try:
            for start in self.starts:
                with _as_draft_errors():
                    self.workers.append(start())
            bar = {"desc": "starting the draft", "unit": "worker", "leave": False}
            # Once a second: where there is no terminal, each time is a line of a log.
            pace = {"delay": SHOWN_AFTER, "mininterval": 1.0, "miniters": 0}
            with logging.tqdm(total=len(self.workers), **bar, **pace) as progress:
                for worker in self.workers:
                    with _as_draft_errors():
                        worker.connect(waiting=lambda: progress.update(0))
                    progress.update()
        except BaseException:
            self.finalizer()
            raise
        return self.workers[0].facts

    def open_session(self, request: SessionRequest, device: torch.device) -> DraftSession:
        """
        Starts a generate() call, after the calls of other threads. Workers that have ended since the last one are
        started again first.

        Args:
            request ([`SessionRequest`]): The call.
            device (`torch.device`): Where the target wants to have what it receives.

        Raises:
            `ValueError`: the assistant was closed, or this is called from within a call that it serves.
            [`DraftError`]: no worker starts.
        """
        if self.in_use_by == threading.get_ident():
            raise ValueError("This draft assistant serves a call that has not ended; use another one within it.")
        self.turn.acquire()
        self.in_use_by = threading.get_ident()
        try:
            if self.closed:
                raise ValueError("This draft assistant was closed; call hf_ssd.launch_draft() again.")
            self._restart()
            self.sessions += 1
            alive = [worker for worker in self.workers if worker.is_alive]
            if any(worker.is_on(device) for worker in alive):
                devices.warn_of_sharing(device)
            if request.generation_config.do_sample:
                for worker in alive:
                    worker.link_gpus(device)
            if len(alive) == 1:
                return WorkerSession(alive[0], self.sessions, request, on_close=self._end_turn)
            return TeamSession(alive, self.sessions, request, on_close=self._end_turn)
        except BaseException:
            for worker in self.workers:
                worker.kill()  # one may have half a message
            self._end_turn()
            raise

    def _end_turn(self) -> None:
        self.in_use_by = None
        self.turn.release()

    def _restart(self) -> None:
        ended = {index for index, worker in enumerate(self.workers) if not worker.is_alive}
        if len(ended) < len(self.workers):
            ended -= self.lost  # it would be waited for in each call, and the others can do without
        failures = {}
        for index in sorted(ended):
            self.workers[index].kill()
            logger.warning("The draft worker had ended; starting another one.")
            try:
                with _as_draft_errors():
                    self.workers[index] = self.starts[index]()
            except DraftError as error:
                failures[index] = error
        for index in sorted(ended - failures.keys()):
            try:
                with _as_draft_errors():
                    self.workers[index].connect()
            except DraftError as error:
                failures[index] = error
        self.lost = (self.lost - ended) | failures.keys()
        if failures and not any(worker.is_alive for worker in self.workers):
            raise next(iter(failures.values()))
        for error in failures.values():
            logger.warning(f"Going on without a draft worker. {error}")

    def close(self) -> None:
        """
        Ends the workers. May be called more than once. A call that another thread has under way finishes by plain
        decoding.
        """
        if self.closed:
            return
        self.closed = True
        if self.turn.acquire(blocking=False):
            try:
                for worker in self.workers:
                    worker.stop()
            finally:
                self.finalizer()
                self.turn.release()
        elif self.finalizer.detach():
            for worker in self.workers:
                worker.end()  # its channel is closed by the call that uses it
            self.on_close()

    def __enter__(self) -> "DraftAssistant":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def _end_all(workers: list[Connection], on_close: Callable[[], None]) -> None:
    for worker in workers:
        worker.kill()
    on_close()


@contextlib.contextmanager
def _as_draft_errors() -> Iterator[None]:
    """Whatever keeps a worker from starting is a [`DraftError`]."""
    try:
        yield
    except DraftError:
        raise
    except (OSError, RuntimeError) as error:
        raise DraftError(f"The draft worker could not be started: {error}") from error
