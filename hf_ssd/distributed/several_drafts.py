"""A generate() call with several draft workers, or with a fallback in the target's process."""

import dataclasses
import math
import time
from collections.abc import Callable

import torch
from transformers.utils import logging

from ..drafting.custom_fallback import CustomFallback
from ..drafting.fallbacks import join
from ..drafting.mtp_fallback import MtpFallback
from ..drafting.speculator import answer_width
from ..rounds import FINISHED, NOTHING, PREPARED, PRIMARY, Outcome, Plan, Speculation
from .sessions import DraftError, DraftSession, SessionRequest, WorkerSession
from .wire import Kind

logger = logging.get_logger(__name__)


def open_session(workers: list, number: int, request: SessionRequest, on_close: Callable[[], None]) -> DraftSession:
    """Begins a call with workers at rest. See [`WorkerSession`] and [`SeveralDrafts`]."""
    if len(workers) == 1 and request.answers_alone:
        return WorkerSession(workers[0], number, request, on_close)
    return SeveralDrafts(workers, number, request, on_close)


class SeveralDrafts(DraftSession):
    """
    Each worker sends the speculation that it has prepared for the outcome of the round. No two workers prepare the same
    outcome, so each row takes the speculation of the worker that has it, or the proposal of the target's fallback. If
    tokens are still missing, the first worker, the *primary*, completes the speculation. The others are told the
    result.

    A worker that fails is left out from then on. The failure is an error only if no worker is left, or if
    `on_draft_failure` is `"raise"`. For the arguments see [`WorkerSession`].
    """

    def __init__(self, workers: list, number: int, request: SessionRequest, on_close: Callable[[], None]):
        self.config, self.on_close, self.vocab_size = request.config, on_close, request.vocab_size
        self.sampled = bool(request.generation_config.do_sample)
        self.fallback = None
        if request.head is not None:
            self.fallback = MtpFallback(request.head, request)
        elif request.asks_target:
            self.fallback = CustomFallback(request.config.fallback, request.vocab_size)
        self.texts = [prompt.tolist() for prompt in request.prompts]
        self.verified: list[list[int]] = [[] for _ in self.texts]
        shares = [dataclasses.replace(request, worker_index=i, num_workers=len(workers)) for i in range(len(workers))]
        self.sessions = [WorkerSession(worker, number, share) for worker, share in zip(workers, shares)]

    def send_outcome(self, outcome: Outcome, plan: Plan, features: torch.Tensor | None = None) -> None:
        self.plan, self.live = plan, [k != FINISHED for k in outcome.accepted]
        later = outcome.later or [[] for _ in self.texts]
        for row, (k, token) in enumerate(zip(outcome.accepted, outcome.bonus)):
            if k != FINISHED:
                self.texts[row] += [*self.verified[row][:k], token, *later[row]]
        of_drafts = None if self.fallback is not None and self.fallback.reads_features else features
        self._each(lambda session: session.send_outcome(outcome, plan, of_drafts))
        if self.fallback is not None:
            self.fallback.take_in(outcome, plan, features)

    def receive_speculation(self) -> Speculation:
        # 1. Each row takes the tokens of the worker that has prepared its outcome, or of the target's fallback.
        deadline = time.monotonic() + self.config.timeout
        found = self._merge(self._each(lambda session: self._receive(session, deadline)))
        missed = [row for row, live in enumerate(self.live) if live and found.record.sources[row] != PREPARED]
        if missed and self.fallback is not None and found.record.budget:
            found, missed = self._ask_fallback(found, missed), []
        known = [len(tokens) if live else math.inf for live, tokens in zip(self.live, found.tokens)]
        width = answer_width(self.plan, known) if any(found.record.hits) else found.width

        # 2. The primary drafts missing tokens. If rows have missed, it asks the plan's fallback and settles the width.
        primary, found.record.lookahead = None, 0 if missed else width
        if missed or min(known) < width:
            completed = None
            while completed is None:
                primary = self.sessions[0]
                completed = self._try(primary, lambda session: self._complete(session, found))
            found = completed
        else:
            found.tokens = [row[:width] if live else [0] * width for live, row in zip(self.live, found.tokens)]
            found.record.sources = [PRIMARY if source == NOTHING else source for source in found.record.sources]
            self.q = None if self.q is None else self.q[:, :width]

        # 3. The other workers are told which tokens are verified.
        self.verified = found.tokens
        self._each(lambda session: None if session is primary else session.send_speculation(found))
        if self.fallback is not None:
            self.fallback.verify(found.tokens, found.record.sources)
        return found

    def receive_probabilities(self) -> torch.FloatTensor | None:
        return self.q

    def _receive(self, session: WorkerSession, deadline: float) -> Speculation:
        found = session.receive_speculation(max(0.0, deadline - time.monotonic()))
        if self.sampled and found.width:
            found.probabilities = session.receive_probabilities()
        return found

    def _merge(self, all_found: list[Speculation]) -> Speculation:
        """Returns the prepared tokens of each row, with the record of the worker that took the longest time."""
        record = max((one.record for one in all_found), key=lambda record: record.draft_seconds)
        budget, sources = sum(one.record.budget for one in all_found), [NOTHING] * len(self.texts)
        merged = Speculation([[] for _ in sources], None, dataclasses.replace(record, budget=budget, sources=sources))
        self.q = None
        for one in all_found:
            for row in [row for row, hit in enumerate(one.record.hits) if hit and self.live[row]]:
                sources[row], merged.tokens[row] = PREPARED, one.tokens[row]
                if one.probabilities is not None:
                    if self.q is None:
                        width = max(one.width for one in all_found)
                        self.q = one.probabilities.new_zeros(len(sources), width, self.vocab_size)
                        self.q[..., 0] = 1.0  # for rows that are finished, whose tokens are 0
                    self.q[row, : one.width] = one.probabilities[row].to(self.q.device)
        return merged

    def _ask_fallback(self, found: Speculation, missed: list[int]) -> Speculation:
        lengths = [len(text) for text in self.texts]
        ids = torch.tensor([text + [0] * (max(lengths) - len(text)) for text in self.texts])
        proposal = self.fallback.propose(ids, lengths, missed, self.plan.lookahead)
        device = self.fallback.device
        found.probabilities, device = self.q if self.q is None else self.q.to(device), device if self.sampled else None
        joined = join(found, missed, proposal, self.plan.lookahead, self.vocab_size, device)
        self.q, joined.probabilities = joined.probabilities, None
        for row in missed:
            joined.record.sources[row] = self.fallback.source
        return joined

    def _complete(self, primary: WorkerSession, found: Speculation) -> Speculation:
        """Lets the primary draft the missing tokens, and joins the distributions of all tokens."""
        primary.send_speculation(found, Kind.COMPLETE)
        completed = primary.receive_speculation()
        q = primary.receive_probabilities() if self.sampled and completed.width else None
        for row, tokens in enumerate(found.tokens if q is not None and self.q is not None else ()):
            depth = min(len(tokens), q.shape[1], self.q.shape[1])
            q[row, :depth] = self.q[row, :depth].to(q.device)
        self.q, new = q, completed.record
        record = dataclasses.replace(found.record, sources=new.sources, lookahead=new.lookahead, steps=new.steps)
        record.answer_seconds += new.answer_seconds
        return dataclasses.replace(found, tokens=completed.tokens, record=record)

    # ---------------------------------------------------------------- failures and the end

    def _each(self, step: Callable[[WorkerSession], object]) -> list:
        """Returns the results of a step for the workers with which it succeeds."""
        results = [self._try(session, step) for session in list(self.sessions)]
        return [result for result in results if result is not None]

    def _try(self, session: WorkerSession, step: Callable[[WorkerSession], object]):
        """Returns the result of the step, or `None` if it fails. Then this worker takes no further part in the call."""
        try:
            return step(session)
        except DraftError as error:
            self.sessions.remove(session)
            session.close()
            if not self.sessions or self.config.on_draft_failure == "raise":
                raise
            logger.warning(f"Going on with {len(self.sessions)} of the draft workers. {error}")
            return None

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        self.on_close()
