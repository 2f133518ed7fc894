"""The draft as the decoding loop uses it: it may come late, rest, or fail, and the loop goes on."""

import dataclasses
import os

import torch
from transformers.utils import logging

from ..distributed import payloads
from ..distributed.assistant import DraftAssistant, Turn
from ..distributed.local import LocalSession
from ..distributed.messages import Kind, Message
from ..distributed.session import DraftError, DraftSession, SessionRequest
from ..distributed.target_ranks import TargetRanks
from ..planning.planner import Planner
from ..rounds import FILLER, PLAIN, Outcome, RoundRecord, Speculation

logger = logging.get_logger(__name__)


class FaultTolerantDraft:
    """
    The draft for one call, whose failure costs speed and not tokens: after it, every speculation is empty. So are they
    while the worker is starting, or while the plan is plain decoding; the draft is told of such rounds when it is asked
    again. Where several ranks hold the target, only the leader has a draft; the others are told its decisions and
    answers.

    Args:
        assistant ([`DraftAssistant`] or `PreTrainedModel`): The worker, or a model to run in this process.
        request ([`SessionRequest`]): The call.
        planner ([`Planner`]): Says what to ask for.
        device (`torch.device`): Where the target's tokens are.
        ranks ([`TargetRanks`]): The ranks of the target.

    Attributes:
        rounds (`int`): How many speculations there were.
        joined_at (`int`, *optional*): How many of them before the draft was there, if it was asked for; `None` if it
            is not there.
        failure (`str`, *optional*): Why the draft was given up, if it was.
    """

    def __init__(self, assistant, request: SessionRequest, planner: Planner, device: torch.device, ranks: TargetRanks):
        self.assistant, self.request, self.planner = assistant, request, planner
        self.device, self.ranks = device, ranks
        self.process, self.turn = os.getpid(), Turn()
        self.untold: list[Outcome] = []  # outcomes of rounds for which the draft was not asked
        self.is_asked = self.was_late = False
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
        """Opens the session, if there is a plan for the draft and it is ready."""
        if self.failure is None and self.session is None and self.planner.plan.mode != PLAIN:
            self.session = self._attempt(self._open_session)
            self.was_late = self.was_late or self.session is None
            if self.session is not None:
                self.joined_at = self.rounds if self.joined_at is None and self.was_late else self.joined_at or 0
                self.untold = []

    def _open_session(self) -> DraftSession | None:
        if isinstance(self.assistant, DraftAssistant):
            return self.assistant.open_session(self.turn, self._request_now, self.device)
        return LocalSession(self.assistant, self._request_now())

    def _request_now(self) -> SessionRequest:
        """For a draft that joins late, what was generated before is part of the prompts."""
        planned = {"plan": self.planner.plan, "profile": self.planner.profiles}
        if not self.untold:
            return dataclasses.replace(self.request, **planned)
        accepted = torch.stack([outcome.accepted for outcome in self.untold], dim=1)
        tokens = torch.stack([outcome.bonus for outcome in self.untold], dim=1)
        prompts = [  # nothing was proposed: each outcome is one token
            torch.cat([prompt, tokens[row, accepted[row] >= 0].to(prompt.device)])
            for row, prompt in enumerate(self.request.prompts)
        ]
        return dataclasses.replace(self.request, prompts=prompts, **planned)

    def send_outcome(self, outcome: Outcome | None) -> Outcome:
        """
        Tells the draft, unless the plan is plain decoding, and the other ranks, what was decided.

        Args:
            outcome ([`~hf_ssd.rounds.Outcome`], *optional*): Where it was decided.

        Returns:
            [`~hf_ssd.rounds.Outcome`]: On every rank.
        """
        if self.decides and self.failure is None:
            self.untold.append(outcome)
            plan, self.filler = self.planner.plan, None
            if self.session is not None:
                self.filler = self.planner.next_filler()
            self.is_asked = self.session is not None and self.filler is None and plan.mode != PLAIN
            if self.is_asked:
                untold, self.untold = self.untold, []
                self._attempt(lambda: self.session.send_outcomes(untold, plan))
        if self.ranks.size == 1:
            return outcome
        payload = torch.cat([outcome.accepted, outcome.bonus]) if self.decides else None
        message = self.ranks.share(Message(Kind.OUTCOME, payload=payload) if self.decides else None)
        return Outcome(*message.payload.view(2, -1))

    def receive_speculation(self, last: torch.LongTensor) -> Speculation:
        """
        Returns what to verify next.

        Args:
            last (`torch.LongTensor` of shape `(batch_size,)`): The last token of each row, for a pass that is timed.
        """
        self.rounds += 1
        speculation = None
        if self.is_asked and self.session is not None:
            speculation = self._attempt(lambda: self.session.receive_speculation())
            if speculation is not None and speculation.costs is not None:
                self.planner.observe_profile(speculation.costs)
        elif self.decides and self.failure is None:
            self._join()  # it reads the prompts while the target verifies, and answers to what comes out of that
            if self.session is not None and self.filler:
                speculation = self._filler(last)
        if self.decides and speculation is None:
            speculation = Speculation.empty(len(self.request.prompts))
        if self.ranks.size == 1:
            return speculation
        payload = payloads.speculation_to_payload(speculation) if self.decides else None
        message = self.ranks.share(Message(Kind.SPECULATION, payload=payload) if self.decides else None)
        return payloads.payload_to_speculation(message.payload, len(self.request.prompts))

    def _filler(self, last: torch.LongTensor) -> Speculation:
        """Returns certain tokens that are hardly right: verifying them is a plain step whose pass is wider."""
        tokens = last.cpu()[:, None].repeat(1, self.filler)
        return Speculation(tokens, None, RoundRecord(PLAIN, self.filler, sources=[FILLER] * len(tokens)))

    def receive_probabilities(self) -> torch.FloatTensor | None:
        """Where outcomes are decided, what the tokens were drawn from, or `None` if that is lost."""
        return self._attempt(lambda: self.session.receive_probabilities()) if self.session is not None else None

    def finish(self, device: torch.device, sampled: bool) -> None:
        """Lets all ranks end the call with the same figures and the same random state."""
        if self.joined_at is None and not self.was_late:
            self.joined_at = 0  # it was never asked
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
