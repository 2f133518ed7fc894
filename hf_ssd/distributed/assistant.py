"""The draft as users hold it: one or several workers that serve call after call."""

import threading
from collections.abc import Callable

import torch
from transformers.utils import logging

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
        self.closed = False
        self.workers: list[Connection] = []
        with self.ranks.one_call():
            facts = self.ranks.share_values(self._start_all() if self.ranks.is_leader else None)
        self.vocab_size, self.device = facts["vocab_size"], facts["device"]

    def _start_all(self) -> dict:
        """Returns what the first worker says of its model."""
        try:
            for start in self.starts:
                self.workers.append(start())
            bar = {"desc": "starting the draft", "unit": "worker", "leave": False}
            with logging.tqdm(total=len(self.workers), delay=SHOWN_AFTER, miniters=0, **bar) as progress:
                for worker in self.workers:
                    worker.connect(waiting=lambda: progress.update(0))
                    progress.update()
        except BaseException:
            for worker in self.workers:
                worker.kill()
            self.on_close()
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
            `ValueError`: the assistant was closed.
            [`DraftError`]: no worker starts.
        """
        if self.closed:
            raise ValueError("This draft assistant was closed; call hf_ssd.launch_draft() again.")
        self.turn.acquire()
        try:
            self._restart()
            self.sessions += 1
            alive = [worker for worker in self.workers if worker.is_alive]
            if request.generation_config.do_sample:
                for worker in alive:
                    worker.link_gpus(device)
            if len(self.workers) == 1:
                return WorkerSession(alive[0], self.sessions, request, on_close=self.turn.release)
            return TeamSession(alive, self.sessions, request, on_close=self.turn.release)
        except BaseException:
            for worker in self.workers:
                worker.kill()  # one may have half a message
            self.turn.release()
            raise

    def _restart(self) -> None:
        ended = [index for index, worker in enumerate(self.workers) if not worker.is_alive]
        for index in ended:
            self.workers[index].kill()
            logger.warning("The draft worker had ended; starting another one.")
            self.workers[index] = self.starts[index]()
        for index in ended:
            try:
                self.workers[index].connect()
            except DraftError as error:
                if not any(worker.is_alive for worker in self.workers):
                    raise
                logger.warning(f"Going on without a draft worker. {error}")

    def close(self) -> None:
        """Ends the workers. May be called more than once."""
        if self.closed:
            return
        self.closed = True
        for worker in self.workers:
            worker.stop()
        self.on_close()

    def __enter__(self) -> "DraftAssistant":
        return self

    def __exit__(self, *exception) -> None:
        self.close()
