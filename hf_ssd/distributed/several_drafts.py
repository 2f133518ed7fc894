"""A generate() call with several draft workers."""

import dataclasses
import time
from collections.abc import Callable

import torch
from transformers.utils import logging

from ..drafting.request import SessionRequest
from ..drafting.speculator import answer_width
from ..rounds import NOTHING, PREPARED, PRIMARY, Outcome, Plan, Speculation
from .sessions import DraftError, DraftSession, WorkerSession

logger = logging.get_logger(__name__)

TIME_TO_READ = 0.5  # seconds for an answer of which others have used up the deadline; it has usually arrived


class SeveralDrafts(DraftSession):
    """No two workers prepare the same outcome. The first worker, the *primary*, drafts the tokens that are missing."""

    def __init__(self, workers: list, number: int, request: SessionRequest):
        self.config, self.vocab_size = request.config, request.vocab_size
        self.uses_q = request.config.uses_q(request.generation_config.do_sample)
        shares = [dataclasses.replace(request, worker_index=i, num_workers=len(workers)) for i in range(len(workers))]
        self.sessions = [WorkerSession(worker, number, share) for worker, share in zip(workers, shares)]

    def begin(self) -> None:
        self._each(lambda session: session.begin())

    def join(self, *row) -> None:
        self._each(lambda session: session.join(*row))

    def send_outcome(self, outcome: Outcome, plan: Plan) -> None:
        self.plan, self.live = plan, [bool(tokens) for tokens in outcome.tokens]
        self._each(lambda session: session.send_outcome(outcome, plan))

    def receive_speculation(self) -> Speculation:
        # 1. Each row takes the tokens of the worker that has prepared its outcome.
        deadline = time.monotonic() + self.config.timeout
        found = self._merge(self._each(lambda session: self._receive(session, deadline)))
        record = found.record
        proposes = record.budget and self.plan.fallback != PRIMARY  # the target's process, for rows that missed
        missed = [bool(proposes) and is_live and not is_hit for is_live, is_hit in zip(self.live, record.hits)]

        # 2. The primary drafts missing tokens.
        known = [len(row) for row, live, other in zip(found.tokens, self.live, missed) if live and not other]
        width = answer_width(self.plan, known) if known else 0
        found.tokens, primary, completed = [tokens[:width] for tokens in found.tokens], None, None
        while completed is None and min(known, default=width) < width:
            primary = self.sessions[0]
            primary.send_proposals(found.tokens, record.sources, width)
            completed = self._try(primary, lambda one: self._receive(one, time.monotonic() + self.config.timeout))
        if completed is not None:
            found.tokens, record.steps, self.q = completed.tokens, completed.record.steps, completed.probabilities
            record.answer_seconds += completed.record.answer_seconds
        self.answer = found
        if any(missed):
            return found
        record.sources = [PRIMARY if source == NOTHING else source for source in record.sources]

        # 3. The other workers are told which tokens are verified.
        told = found.tokens, record.sources
        self._each(lambda session: None if session is primary else session.send_proposals(*told))
        return found

    def send_proposals(self, tokens: list[list[int]], sources: list[str]) -> None:
        self._each(lambda session: session.send_proposals(tokens, sources))

    def receive_probabilities(self) -> torch.FloatTensor | None:
        """Returns the primary's distributions, and in their place those of tokens that a worker had prepared."""
        q = self.q
        if q is None:
            q = torch.zeros(len(self.live), self.answer.width, self.vocab_size)
            q[..., 0] = 1.0  # for rows that are finished, whose tokens are 0
        for row, prepared in self.prepared.items():
            depth = min(len(prepared), q.shape[1])
            q[row, :depth] = prepared[:depth]
        return q

    def _receive(self, session: WorkerSession, deadline: float) -> Speculation:
        found = session.receive_speculation(max(TIME_TO_READ, deadline - time.monotonic()))
        if self.uses_q and found.width:
            found.probabilities = session.receive_probabilities()
        return found

    def _merge(self, all_found: list[Speculation]) -> Speculation:
        """Returns the prepared tokens of each row, with the record of the worker that took the longest time."""
        merged, self.q, self.prepared = Speculation.empty(len(self.live)), None, {}
        sources, budget = merged.record.sources, sum(one.record.budget for one in all_found)
        longest = max((one.record for one in all_found), key=lambda record: record.draft_seconds)
        merged.record = dataclasses.replace(longest, budget=budget, sources=sources)
        for one in all_found:
            for row in [row for row, hit in enumerate(one.record.hits) if hit and self.live[row]]:
                sources[row], merged.tokens[row] = PREPARED, one.tokens[row]
                if one.probabilities is not None:
                    self.prepared[row] = one.probabilities[row, : len(one.tokens[row])]
        return merged

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
