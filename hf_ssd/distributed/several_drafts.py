"""A generate() call with several draft workers, or with a fallback that is the user's own object."""

import dataclasses
import math
import time
from collections.abc import Callable

import torch
from transformers.utils import logging

from ..drafting.custom_fallback import CustomFallback
from ..drafting.fallbacks import fallbacks_for, join
from ..drafting.speculator import answer_width
from ..rounds import CUSTOM, FALLBACKS, FINISHED, NOTHING, PREPARED, PRIMARY, Outcome, Plan, Speculation
from .connection import Connection
from .drafts import seed_of_call
from .session import DraftError, DraftSession, SessionRequest
from .worker_session import WorkerSession

logger = logging.get_logger(__name__)

POLL = 5e-5  # polling interval in seconds


class SeveralDrafts(DraftSession):
    """
    Each worker prepares a share of the outcomes, and in each round sends the speculation that it has prepared for the
    outcome of the round. No two workers prepare the same outcome, so each row takes the speculation of the worker that
    has it, or the proposal of a fallback. If tokens are still missing, the first worker, the *primary*, drafts them.
    All workers are told which tokens are verified.

    A worker that fails is left out from then on. The failure is an error only if no worker is left, or if
    `on_draft_failure` is `"raise"`.

    Args:
        workers (`list[Connection]`): The workers, at rest.
        number (`int`): Number of the session.
        request ([`SessionRequest`]): The call.
        on_close (`Callable`): Called once, when the workers are at rest again or have ended.
    """

    def __init__(self, workers: list[Connection], number: int, request: SessionRequest, on_close: Callable[[], None]):
        self.config, self.on_close, self.rows = request.config, on_close, len(request.prompts)
        self.sampled = bool(request.generation_config.do_sample)
        self.custom, self.texts = None, [prompt.tolist() for prompt in request.prompts]
        self.verified: list[list[int]] = [[]] * self.rows
        self.sessions = []
        for index, worker in enumerate(workers):
            share = dataclasses.replace(request, worker_index=index, num_workers=len(workers))
            self.sessions.append(WorkerSession(worker, number, share))
        self.vocab_size = self.sessions[0].vocab_size
        self.fallbacks = fallbacks_for(self.vocab_size, seed_of_call(request, number))
        if request.asks_target:
            self.custom = CUSTOM, CustomFallback(request.config.fallback, self.vocab_size)

    # ---------------------------------------------------------------- a round

    def send_outcome(self, outcome: Outcome, plan: Plan, features: torch.Tensor | None = None) -> None:
        self.plan, self.live = plan, [k != FINISHED for k in outcome.accepted]
        for row, (k, token) in enumerate(zip(outcome.accepted, outcome.bonus)):
            if k != FINISHED:
                later = outcome.later[row] if outcome.later else []
                self.texts[row] += [*self.verified[row][:k], token, *later]
        told = (outcome, plan) if features is None else (outcome, plan, features)
        for session in list(self.sessions):
            self._try(session, session.send_outcome, *told)

    def receive_speculation(self) -> Speculation:
        # 1. Each row takes the tokens of a worker or a fallback. If no outcome was prepared, the draft is asked.
        found = self._merge(self._gather())
        if found.record.budget:
            found = self._ask_fallback(found)
        known = [len(tokens) if live else math.inf for live, tokens in zip(self.live, found.tokens)]
        sources, width = found.record.sources, answer_width(self.plan, known)
        if PREPARED not in sources and not {*FALLBACKS}.isdisjoint(sources):
            width = found.width

        # 2. If tokens are missing, the primary drafts them.
        found.record.lookahead = width
        found.tokens = [row[:width] if live else [0] * width for live, row in zip(self.live, found.tokens)]
        while min(known) < width:
            primary = self.sessions[0]
            completed = self._try(primary, self._complete, primary, found)
            if completed is not None:
                found = completed
                break
        else:
            primary = None

        # 3. The other workers are told which tokens are verified. Rows that are finished count as the primary's.
        found.record.sources = [PRIMARY if source == NOTHING else source for source in found.record.sources]
        self.q = None if self.q is None else self.q[:, :width]
        self.verified = found.tokens
        for session in [session for session in self.sessions if session is not primary]:
            self._try(session, session.send_speculation, found)
        return found

    def _gather(self) -> dict[WorkerSession, Speculation]:
        """Collects the speculations that the workers have prepared."""
        found: dict[WorkerSession, Speculation] = {}
        deadline = time.monotonic() + self.config.timeout
        while waiting := [session for session in self.sessions if session not in found]:
            arrived = [session for session in waiting if session.has_arrived()]
            late = time.monotonic() > deadline
            for session in waiting if late else arrived:  # a late worker raises now
                timeout = 0.0 if late and session not in arrived else None
                one = self._try(session, self._receive_found, session, timeout)
                if one is not None:
                    found[session] = one
            if not arrived:
                time.sleep(POLL)
        return found

    def _receive_found(self, session: WorkerSession, timeout: float | None) -> Speculation:
        found = session.receive_speculation(timeout)
        if self.sampled and found.width:
            found.probabilities = session.receive_probabilities()
        return found

    def _merge(self, found: dict[WorkerSession, Speculation]) -> Speculation:
        """Returns the prepared tokens of each row, with the record of the worker that took the longest time."""
        all_found = list(found.values())
        longest = max(all_found, key=lambda one: one.record.draft_seconds)
        width = max(one.width for one in all_found)
        costs = [one.costs for one in all_found if one.costs is not None]
        merged = dataclasses.replace(
            longest,
            tokens=[[] for _ in range(self.rows)],
            probabilities=None,
            record=dataclasses.replace(longest.record, sources=[NOTHING] * self.rows),
            costs=max(costs, key=sum, default=None),  # of the slowest worker, since each round waits for it
        )
        merged.record.budget = sum(one.record.budget for one in all_found)
        self.q = None
        for one in all_found:
            for row in [row for row, hit in enumerate(one.record.hits) if hit and self.live[row]]:
                grown = one.width
                merged.record.sources[row], merged.tokens[row] = PREPARED, one.tokens[row]
                if one.probabilities is not None:
                    if self.q is None:
                        self.q = self._certain(width, one.probabilities.device)
                    self.q[row, :grown] = one.probabilities[row].to(self.q.device)
        return merged

    def _certain(self, width: int, device) -> torch.FloatTensor:
        """Returns distributions in which token 0 is certain, as they are for rows that are finished."""
        q = torch.zeros(self.rows, width, self.vocab_size, dtype=torch.float32, device=device)
        q[..., 0] = 1.0
        return q

    def _ask_fallback(self, found: Speculation) -> Speculation:
        missed = [row for row, live in enumerate(self.live) if live and found.record.sources[row] != PREPARED]
        source, fallback = self.custom or (self.plan.fallback, self.fallbacks.get(self.plan.fallback))
        if not missed or fallback is None:
            return found
        lengths = [len(text) for text in self.texts]
        ids = torch.tensor([text + [0] * (max(lengths) - len(text)) for text in self.texts])
        proposal = fallback.propose(ids, lengths, missed, self.plan.lookahead)
        found.probabilities = self.q if self.q is None else self.q.cpu()
        device = torch.device("cpu") if self.sampled else None
        joined = join(found, missed, proposal, self.plan.lookahead, self.vocab_size, device)
        self.q, joined.probabilities = joined.probabilities, None
        for row in missed:
            joined.record.sources[row] = source
        return joined

    def _complete(self, primary: WorkerSession, found: Speculation) -> Speculation:
        """Lets the primary draft the missing tokens, and joins the distributions of all tokens."""
        primary.send_speculation(found)
        completed = primary.receive_speculation()
        if self.sampled and completed.width:
            q = primary.receive_probabilities()
            for row, tokens in enumerate(found.tokens):
                depth = 0 if self.q is None else min(len(tokens), q.shape[1], self.q.shape[1])
                if depth:
                    q[row, :depth] = self.q[row, :depth].to(q.device)
            self.q = q
        record = dataclasses.replace(found.record, steps=completed.record.steps)
        record.answer_seconds += completed.record.answer_seconds
        return dataclasses.replace(found, tokens=completed.tokens, record=record)

    def receive_probabilities(self) -> torch.FloatTensor | None:
        return self.q

    # ---------------------------------------------------------------- failures and the end

    def _try(self, session: WorkerSession, step: Callable, *arguments):
        """
        Returns the result of the step, or `None` if it fails. Then this worker takes no further part in the call.

        Raises:
            [`DraftError`]: the step fails and no worker is left, or `on_draft_failure` is `"raise"`.
        """
        try:
            return step(*arguments)
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
