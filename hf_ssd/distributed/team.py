"""The target's end of a conversation with several draft workers, each of which prepares a share of the outcomes."""

import dataclasses
import time
from collections.abc import Callable

import torch
from transformers.utils import logging

from ..cache.speculation import Speculation
from . import payloads
from .connection import Connection
from .conversation import Conversation
from .messages import Kind
from .payloads import Found
from .session import Answer, DraftError, DraftSession, SessionRequest
from .user_fallback import UserFallback

logger = logging.get_logger(__name__)

POLL = 5e-5  # seconds between two looks at who has answered


class TeamSession(DraftSession):
    """
    One generate() call with several workers. In each round every worker says what it has prepared for the outcome, and
    each row takes what one of them has. If nothing is missing, all *follow* that speculation; otherwise the first
    worker, the *lead*, *completes* it as a single worker would, and the others follow. The lead also plans for all.

    A worker that fails is left out from then on. Only when the last one fails is it an error.

    Args:
        workers (`list[Connection]`): The workers, at rest.
        number (`int`): Number of the session.
        request ([`SessionRequest`]): The call.
        on_close (`Callable`): Called once, when the workers are at rest again or have ended.
    """

    def __init__(self, workers: list[Connection], number: int, request: SessionRequest, on_close: Callable[[], None]):
        self.config, self.on_close = request.config, on_close
        self.vocab_size = workers[0].worker_info["vocab_size"]
        self.batch_size = len(request.prompts)
        self.user_fallback = UserFallback.of(request, self.vocab_size)
        self.team = []
        for index, worker in enumerate(workers):
            share = dataclasses.replace(request, share=(index, len(workers)))
            self.team.append(Conversation(worker, number, share))

    # ---------------------------------------------------------------- a round

    def send_outcome(self, accepted: torch.LongTensor, bonus: torch.LongTensor, seconds: float, verified: int) -> None:
        self.live = (accepted >= 0).tolist()
        outcome = payloads.outcome_to_payload(accepted, bonus, seconds, verified)
        for member in list(self.team):
            self._try(member, member.send_outcomes, [outcome])
        if self.user_fallback is not None:
            self.user_fallback.observe_outcome(accepted, bonus)

    def receive_speculation(self) -> Answer:
        found = self._gather()
        answer = None
        while answer is None:  # what only a lost lead had is missing then, and the next one completes
            lead = self.team[0]
            self.owners, known, ready = self._merge(found)
            first = found.get(lead) or next(iter(found.values()))
            plan, width, source = first.plan, self._shortest(known), "primary"
            budget = sum(one.answer.budget for one in found.values())
            if width >= plan.lookahead:
                self.completed_by = None
                answer = dataclasses.replace(first.answer, tokens=ready.tokens[:, :width], hits=ready.hits)
            elif (completed := self._try(lead, self._complete, lead, ready, known)) is not None:
                self.completed_by = lead
                answer, source = completed
        answer.budget = budget
        self.known = [min(n, answer.tokens.shape[1]) for n in known]
        self.shape = (*answer.tokens.shape, self.vocab_size)
        for member in [member for member in self.team if member is not self.completed_by]:
            rows = [row for row, owner in enumerate(self.owners) if owner is member]
            payload = payloads.follow_to_payload(answer.tokens, answer.hits, rows, source, plan)
            self._try(member, member.send, Kind.FOLLOW, payload)
        if self.user_fallback is not None:
            self.user_fallback.observe_speculation(answer.tokens)
        return answer

    def _gather(self) -> dict[Conversation, Found]:
        """Collects what the workers have prepared, until no more is needed."""
        found: dict[Conversation, Found] = {}
        deadline = time.monotonic() + self.config.timeout
        while True:
            waiting = [member for member in self.team if member not in found]
            arrived = [member for member in waiting if member.has_arrived()]
            if time.monotonic() > deadline:
                arrived = waiting  # each of them now says that it is late
            for member in arrived:
                one = self._try(member, self._receive_found, member)
                if one is not None:
                    found[member] = one
            if len(found) == len(self.team) or self._is_enough(found):
                return found
            if not arrived:
                time.sleep(POLL)

    def _receive_found(self, member: Conversation) -> Found:
        timeout = member.timeout if member.has_arrived() else 0.0
        message = member.receive(Kind.FOUND, timeout=timeout)
        with member.expecting_sense():
            found = payloads.payload_to_found(message.payload, self.batch_size)
            payloads.check_tokens(found.answer.tokens.flatten(), self.vocab_size)
        return found

    def _is_enough(self, found: dict[Conversation, Found]) -> bool:
        """Whether all rows have what the plan asks for, so that no one else need be waited for."""
        if not found:
            return False
        return self._shortest(self._merge(found)[1]) >= next(iter(found.values())).plan.lookahead

    def _shortest(self, known: list[int]) -> int:
        return min((n for n, live in zip(known, self.live) if live), default=0)

    def _merge(self, found: dict[Conversation, Found]) -> tuple[list[Conversation | None], list[int], Speculation]:
        """Returns whose tokens each row takes, how many there are, and the tokens."""
        owners: list[Conversation | None] = [None] * self.batch_size
        known, hits = [0] * self.batch_size, torch.zeros(self.batch_size, dtype=torch.bool)
        width = max(one.answer.tokens.shape[1] for one in found.values())
        tokens = torch.zeros(self.batch_size, width, dtype=torch.long)
        for member in [member for member in self.team if member in found]:
            theirs = found[member].answer
            grown = theirs.tokens.shape[1]
            for row in theirs.hits.nonzero().flatten().tolist():
                hits[row] = True
                if grown > known[row]:
                    owners[row], known[row] = member, grown
                    tokens[row, :grown] = theirs.tokens[row]
        return owners, known, Speculation(tokens, None, hits)

    def _complete(self, lead: Conversation, ready: Speculation, known: list[int]) -> tuple[Answer, str]:
        lead.send(Kind.COMPLETE, payloads.complete_to_payload(ready.tokens, ready.hits, known))
        message = lead.receive(Kind.COMPLETED, Kind.BACKUP_REQUEST)
        if message.kind == Kind.BACKUP_REQUEST:
            self.user_fallback.answer(message, lead)
            message = lead.receive(Kind.COMPLETED)
        with lead.expecting_sense():
            completed = payloads.payload_to_completed(message.payload, self.batch_size)
            payloads.check_tokens(completed[0].tokens.flatten(), self.vocab_size)
        lead.expect()  # probabilities may arrive while the target computes
        return completed

    def receive_probabilities(self) -> torch.FloatTensor | None:
        """`None` if a worker was lost that alone knows what its tokens were drawn from."""
        link = self.team[0].worker.channel.link
        q = torch.zeros(self.shape, dtype=torch.float32, device="cpu" if link is None else link.device)
        q[..., 0] = 1.0  # of rows that are finished
        complete = True
        if self.completed_by is not None:
            theirs = self._receive_q(self.completed_by, self.shape)
            complete, q = theirs is not None, q if theirs is None else theirs
        for member in {owner for owner in self.owners if owner not in (None, self.completed_by)}:
            rows = [row for row, owner in enumerate(self.owners) if owner is member]
            depth = max(self.known[row] for row in rows)
            theirs = self._receive_q(member, (len(rows), depth, self.vocab_size)) if depth else q[rows, :0]
            if theirs is None:
                complete = False
            else:
                q[rows, :depth] = theirs.to(q.device)
        return q if complete else None

    def _receive_q(self, member: Conversation, shape: tuple[int, ...]) -> torch.FloatTensor | None:
        def receive():
            message = member.receive(Kind.PROBABILITIES)
            with member.expecting_sense():
                return payloads.payload_to_probabilities(message.payload, shape)

        return self._try(member, receive) if member in self.team else None

    # ---------------------------------------------------------------- failures and the end

    def _try(self, member: Conversation, step: Callable, *arguments):
        """Returns what the step gives, or `None` if it fails, which is the end of this worker's part."""
        try:
            return step(*arguments)
        except DraftError as error:
            self.team.remove(member)
            member.close()
            if not self.team or self.config.on_draft_failure == "raise":
                raise
            logger.warning(f"Going on with {len(self.team)} of the draft workers. {error}")
            return None

    def close(self) -> None:
        for member in self.team:
            member.close()
        self.on_close()
