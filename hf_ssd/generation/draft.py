"""The draft as the decoding loop uses it: the loop goes on if the draft joins late, pauses or fails."""

import dataclasses
import os

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from ..cache.support import last_position_limit
from ..distributed.sessions import DraftError, DraftSession
from ..drafting.request import SessionRequest
from ..planning.planner import Planner
from ..rounds import AHEAD, IN_TURN, PLAIN, Outcome, Speculation
from .local_session import LocalSession
from .proposers.proposers import Proposers
from .target import Features
from .tokenizers import check_coverage

logger = logging.get_logger(__name__)


class FaultTolerantDraft:
    """
    The draft of a call. Speculations are empty in plain mode, until a session is open, and after a failure, which
    costs speed but no tokens. [`Proposers`] in this process have tokens for some rows. If several ranks hold the
    target, the leader alone has a draft, and shares its speculations.
    """

    def __init__(self, assistant, model, request: SessionRequest, planner: Planner, device: torch.device, ranks, cores):
        self.assistant, self.model, self.request, self.planner = assistant, model, request, planner
        self.device, self.ranks, self.cores = device, ranks, cores
        self.decides = ranks.is_leader  # on outcomes
        self.process = os.getpid()
        self.session: DraftSession | None = None
        self.is_local = self.is_asked = False
        self.texts = [prompt.tolist() for prompt in request.prompts]  # the verified tokens of each row
        self.verified: list[list[int]] = [[] for _ in self.texts]  # the tokens that are being verified
        # In a running batch, whose prompts are empty, the rows that are read or decoded, with their settings and seed
        # once all of their prompt is read; and those that the session knows.
        self.joined: dict[int, tuple[GenerationConfig | None, int]] = {}
        self.is_running_batch = not any(self.texts)
        self.seated: set[int] = set() if self.is_running_batch else set(range(len(self.texts)))
        self.told = [0] * len(self.texts)  # tokens of each row that the session was told of
        self.read = [0] * len(self.texts)  # tokens of each row whose features the session has
        self.proposers = Proposers(request, self.texts)
        self.positions = None if model is None else last_position_limit(model)  # looks at all layers
        self.rounds = 0  # speculations so far
        self.lost: list[DraftError] = []  # to be raised with the next outcome, where all ranks are told
        self.joined_at: int | None = 0  # speculations until a session was open; `None` while a late session may come
        self.failure: str | None = None  # why the draft was given up

    @property
    def _wants_worker(self) -> bool:
        return self.assistant is not None and (self.planner.plan.mode == AHEAD or self.model is None)

    @property
    def _worker_starts(self) -> bool:
        return self.assistant is not None and self.assistant.state == "starting"

    def open(self, patience: float) -> None:
        """Begins the call, waiting up to `patience` seconds for a worker. [`~FaultTolerantDraft.close`] must follow."""
        if not self.decides:
            return
        if self.assistant is not None:
            self._attempt(self.assistant.begin_call, patience)
        if self.request.translation is not None:
            self._attempt(check_coverage, self.request.translation, self.request.prompts)
        self.planner.begin_call()  # not before, because the call may have waited, and others have measured the pair
        self._join()
        self.cores.divide(self._worker_starts)

    # ---------------------------------------------------------------- sessions

    def _join(self) -> None:
        """Opens the session that the plan asks for, if its draft is ready. It answers the round being verified."""
        is_plain = self.planner.plan.mode == PLAIN and not self.planner.expects_draft
        if self.failure is not None or is_plain or self.proposers.has_no_draft:
            return
        session = None
        if self._wants_worker:
            session = self._attempt(self.assistant.open_session, self._request_now, self.device)
        is_local = session is None and self.failure is None and not self.is_local and self.model is not None
        if is_local:
            session = self._attempt(LocalSession, self.model, self._request_now(in_turn=True))
        if session is not None:
            if self.session is not None:
                self.session.close()
            self.session, self.is_local, self.is_asked = session, is_local, False
            self._attempt(session.begin)
            self.told, self.read = list(map(len, self.texts)), [0] * len(self.texts)
            if self.is_running_batch:
                self.told, self.seated = [0] * len(self.texts), set()
            self.proposers.begin_session(self._request_now)
            if self.model is None:
                self.positions = self.assistant.positions
        if self.session is None:
            self.joined_at = None
        elif self.joined_at is None:
            self.joined_at = self.rounds

    def _request_now(self, in_turn: bool = False) -> SessionRequest:
        """Returns the request. For a draft that joins late, the tokens generated so far are part of the prompts."""
        plan = self.planner.plan
        plan = dataclasses.replace(plan, mode=IN_TURN, budget=0) if in_turn else plan
        if self.is_running_batch:
            return dataclasses.replace(self.request, plan=plan)
        return dataclasses.replace(self.request, prompts=list(map(torch.tensor, self.texts)), plan=plan)

    # ---------------------------------------------------------------- rows of a running batch

    def join(self, row: int, tokens: list[int], options: GenerationConfig | None, seed: int) -> None:
        """Takes in the next tokens of the prompt of a row. It takes part from the round on that its `options` come."""
        if row not in self.joined:
            self.texts[row], self.told[row], self.read[row] = [], 0, 0
            self.seated.discard(row)
        self.texts[row] += tokens
        self.joined[row] = options, seed
        if options is not None:
            self.proposers.joined.add(row)

    def leave(self, row: int) -> None:
        """A row has ended, or takes part no more."""
        self.texts[row] = []
        self.joined.pop(row, None)

    def _tell_of_rows(self) -> None:
        """Tells the session of rows that it does not know, with all of their tokens so far."""
        for row in self.joined.keys() - self.seated:
            options, seed = self.joined[row]
            start, self.told[row] = self.told[row], len(self.texts[row])
            new = row, start, self.texts[row][start:], options, seed
            self._attempt(self.session.join, *new)
            for proposer in self.proposers.fallbacks.values():
                proposer.join(*new)
            if options is not None:
                self.seated.add(row)
            if self.session is None:
                return

    # ---------------------------------------------------------------- a round

    def send_outcome(self, outcome: Outcome, features: Features | None = None) -> Outcome:
        """Tells the draft, unless the plan is plain decoding. Returns the outcome of the rank that decides."""
        if self.lost:
            raise self.lost.pop()
        if self.decides:
            plan = self.planner.plan
            for text, tokens in zip(self.texts, outcome.tokens):
                text += tokens
            knows_limit = self.session is not None and self.positions is not None
            is_full = knows_limit and max(map(len, self.texts)) >= self.positions
            if is_full:
                logger.warning_once(f"The draft has {self.positions} positions; what is longer is decoded plainly.")
            # A worker that is about to be replaced by a session in this process is not asked any more.
            is_right = self.is_local or self.model is None or plan.mode == AHEAD
            self.is_asked = self.session is not None and plan.mode != PLAIN and is_right and not is_full
            if self.is_asked and self.is_local:
                plan = dataclasses.replace(plan, mode=IN_TURN, budget=0)
            proposed = self.proposers.take_in(outcome.tokens, plan, self.is_asked)
            if self.is_asked:
                untold = Outcome(self._untold(outcome), proposed or None)
                if self.joined:
                    self._tell_of_rows()
                untold.states = None if features is None else self._unread(features, untold)
                # A head of the target's own, if it is the fallback, reads features, and then no draft does.
                for_draft = untold if self.request.head is None else dataclasses.replace(untold, states=None)
                if self.session is not None:
                    self._attempt(self.session.send_outcome, for_draft, plan)
                for proposer in self.proposers.fallbacks.values():
                    proposer.take_in(untold, plan)
            if self.proposers.counts_early:
                self.proposers.compare(self.rounds)
        return outcome if self.ranks.size == 1 else Outcome(self.ranks.share_values(outcome.tokens))

    def _untold(self, latest: Outcome) -> list[list[int]]:
        """Returns all tokens that the session was not told of, none of a row that is finished."""
        rows = enumerate(zip(self.texts, self.told, latest.tokens))
        untold = [text[told:] if goes_on and row in self.seated else [] for row, (text, told, goes_on) in rows]
        for row in self.seated:
            self.told[row] = len(self.texts[row])
        return untold

    def _unread(self, features: Features, outcome: Outcome) -> torch.Tensor:
        """Returns the features `(tokens, width)` that the session does not have, row after row."""
        starts, rows = self.read, zip(self.texts, outcome.tokens, self.read)
        self.read = [len(text) - 1 if goes_on else read for text, goes_on, read in rows]
        return features.between(starts, self.read)

    def receive_speculation(self) -> Speculation:
        self.rounds += 1
        speculation = None
        if self.decides:
            if self.session is None or (self.model is not None and self.is_local == self._wants_worker):
                self._join()
            if self.is_asked and self.session is not None:
                speculation = self._attempt(self.session.receive_speculation)
            speculation, is_to_be_told = self.proposers.after_answer(speculation)
            if is_to_be_told:
                self._attempt(self.session.send_proposals, speculation.tokens, speculation.record.sources)
            self.verified = speculation.tokens
        if self.ranks.size > 1:
            speculation = self.ranks.share_speculation(speculation)
        record = speculation.record
        record.early_alone, record.early_beside = self.proposers.counted
        self.cores.divide(record.mode == AHEAD or self._worker_starts)
        record.divided = self.cores.is_divided
        return speculation

    def receive_probabilities(self) -> torch.FloatTensor | None:
        """Returns what the tokens were drawn from; `None` if all are certain, zeros, which accept none, if lost."""
        if not self.decides or self.proposers.are_certain:
            return None
        q = None
        if any(self.proposers.drafted):
            try:
                if self.session is not None:
                    q = self._attempt(self.session.receive_probabilities)
            except DraftError as error:
                self.lost.append(error)
            if q is None:
                shape = len(self.texts), len(self.verified[0]), self.request.vocab_size
                return torch.zeros(1, device=self.device).expand(shape)
        return self.proposers.distributions(self.verified, q, self.device)

    def finish(self, sampled: bool) -> None:
        """Gives all ranks the leader's `failure` and `joined_at` and, if tokens were sampled, its random state."""
        self.failure, self.joined_at = self.ranks.share_values([self.failure, self.joined_at])
        if sampled:
            self.ranks.share_random_state(self.device)

    def close(self) -> None:
        """Ends the call, and again after an interrupt. A worker that may have half a message is ended."""
        self.cores.close()
        # If this process was forked in the middle of the call, the worker belongs to the parent process.
        if self.session is not None and os.getpid() == self.process:
            self.session.close()
        self.session = None

    def _attempt(self, step, *arguments):
        """Returns the result of a step with the draft, or `None` if that fails. Then the draft is given up."""
        try:
            if os.getpid() != self.process:
                raise DraftError("This process was forked in the middle of a call, whose draft is its parent's.")
            return step(*arguments)
        except DraftError as error:
            if self.session is None:
                self.joined_at = None
            self.close()
            if self.request.config.on_draft_failure == "raise":
                raise
            self.failure = str(error)
            logger.warning(f"Finishing without the draft, by plain decoding. {error}")
            return None
