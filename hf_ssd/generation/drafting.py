"""The draft as the decoding loop uses it: it may come late, it may fail, and the loop goes on."""

import dataclasses
import os

import torch
from transformers.utils import logging

from ..distributed import payloads
from ..distributed.assistant import DraftAssistant, Turn
from ..distributed.local import LocalSession
from ..distributed.messages import Kind, Message
from ..distributed.session import Answer, DraftError, DraftSession, SessionRequest
from ..distributed.target_ranks import TargetRanks

logger = logging.get_logger(__name__)


class FaultTolerantDraft:
    """
    The draft for one call, whose failure costs speed and not tokens: after it, every speculation is empty. So are they
    while the worker is starting; when it is ready, it joins in the middle of the call. Where several ranks hold the
    target, only the leader has a draft; the others are told its decisions and its answers.

    Args:
        assistant ([`DraftAssistant`] or `PreTrainedModel`): The worker, or a model to run in this process.
        request ([`SessionRequest`]): The call.
        device (`torch.device`): Where the target's tokens are.
        ranks ([`TargetRanks`]): The ranks of the target.

    Attributes:
        rounds (`int`): How many speculations there were.
        joined_at (`int`, *optional*): How many of them before the draft was there; `None` if it is not.
        failure (`str`, *optional*): Why the draft was given up, if it was.
    """

    def __init__(self, assistant, request: SessionRequest, device: torch.device, ranks: TargetRanks):
        self.assistant, self.request, self.device, self.ranks = assistant, request, device, ranks
        self.process, self.turn = os.getpid(), Turn()
        self.outcomes: list[torch.LongTensor] = []  # of rounds before the draft was there
        self.rounds = 0
        self.joined_at: int | None = None
        self.failure: str | None = None
        self.session: DraftSession | None = None

    @property
    def decides(self) -> bool:
        """Whether this process decides on outcomes."""
        return self.ranks.is_leader

    def open(self, patience: float) -> None:
        """
        Begins the call. Whatever happens, [`~FaultTolerantDraft.close`] must follow.

        Args:
            patience (`float`): Seconds to wait for a worker that is starting, before the call goes on without it.
        """
        if not self.decides:
            return
        if isinstance(self.assistant, DraftAssistant):
            timeout = self.request.config.timeout
            self._attempt(lambda: self.assistant.begin_call(self.turn, timeout, patience))
        self._join()

    def _join(self) -> None:
        if self.failure is None:
            self.session = self._attempt(self._open_session)
            if self.session is not None:
                self.joined_at, self.outcomes = self.rounds, []

    def _open_session(self) -> DraftSession | None:
        if isinstance(self.assistant, DraftAssistant):
            return self.assistant.open_session(self.turn, self._request_now, self.device)
        return LocalSession(self.assistant, self.request)

    def _request_now(self) -> SessionRequest:
        """For a draft that joins late, what was generated before is part of the prompts."""
        if not self.outcomes:
            return self.request
        accepted, tokens = torch.stack(self.outcomes, dim=2)  # nothing was proposed: each outcome is one token
        prompts = [
            torch.cat([prompt, tokens[row, accepted[row] >= 0].to(prompt.device)])
            for row, prompt in enumerate(self.request.prompts)
        ]
        return dataclasses.replace(self.request, prompts=prompts)

    def send_outcome(self, outcome: torch.LongTensor | None, seconds: float, verified: int) -> torch.LongTensor:
        """
        Tells the draft, and the other ranks, what was decided.

        Args:
            outcome (`torch.LongTensor` of shape `(2, batch_size)`, *optional*): Accepted count and bonus token of each
                row, where it was decided.
            seconds (`float`), verified (`int`): See [`~hf_ssd.distributed.session.DraftSession.send_outcome`].

        Returns:
            `torch.LongTensor`: The outcome, on every rank.
        """
        if self.session is not None:
            seconds = seconds if self.rounds > self.joined_at else 0.0
            self._attempt(lambda: self.session.send_outcome(*outcome, seconds, verified))
        elif self.decides and self.failure is None:
            self.outcomes.append(outcome)
        if self.ranks.size == 1:
            return outcome
        payload = payloads.outcome_to_payload(*outcome, seconds, verified) if self.decides else None
        message = self.ranks.share(Message(Kind.OUTCOME, payload=payload) if self.decides else None)
        return torch.stack(payloads.payload_to_outcome(message.payload)[:2])

    def receive_speculation(self) -> Answer:
        self.rounds += 1
        answer = None
        if self.session is not None:
            answer = self._attempt(lambda: self.session.receive_speculation())
        elif self.decides:
            self._join()  # it reads the prompts while the target verifies, and answers to what comes out of that
        if self.decides and answer is None:
            rows = len(self.request.prompts)
            answer = Answer(torch.zeros(rows, 0, dtype=torch.long), torch.zeros(rows, dtype=torch.bool))
        if self.ranks.size == 1:
            return answer
        payload = payloads.answer_to_payload(answer) if self.decides else None
        message = self.ranks.share(Message(Kind.SPECULATION, payload=payload) if self.decides else None)
        return payloads.payload_to_answer(message.payload, len(self.request.prompts))

    def receive_probabilities(self) -> torch.FloatTensor | None:
        """Where outcomes are decided, what the tokens were drawn from, or `None` if that is lost."""
        return self._attempt(lambda: self.session.receive_probabilities()) if self.session is not None else None

    def finish(self, device: torch.device, sampled: bool) -> None:
        """Lets all ranks end the call with the same figures and the same random state."""
        self.failure, self.joined_at = self.ranks.share_values([self.failure, self.joined_at])
        if sampled:
            self.ranks.share_random_state(device)

    def close(self) -> None:
        """May be called more than once, and must be after an interrupt. Workers that are left half told are ended."""
        session, self.session = self.session, None
        if os.getpid() != self.process:
            return  # it was forked in the middle of the call: the worker is its parent's
        try:
            if session is not None:
                session.close()
        finally:
            if isinstance(self.assistant, DraftAssistant):
                self.assistant.end_call(self.turn)

    def _attempt(self, step):
        try:
            if os.getpid() != self.process:
                raise DraftError("This process was forked in the middle of a call, whose draft is its parent's.")
            return step()
        except DraftError as error:
            self.close()
            if self.request.config.on_draft_failure == "raise":
                raise
            self.failure = str(error)
            logger.warning(f"Finishing without the draft, by plain decoding. {error}")
            return None
