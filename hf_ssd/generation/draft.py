"""The draft as the decoding loop uses it: it may come late, rest, or fail, and the loop goes on."""

import dataclasses
import functools
import os

import torch
from transformers.utils import logging

from ..cache.support import last_position_limit
from ..distributed import wire
from ..distributed.assistant import Turn
from ..distributed.local import LocalSession
from ..distributed.session import DraftError, DraftSession, SessionRequest
from ..distributed.wire import Kind, Message
from ..planning.planner import Planner
from ..rounds import AHEAD, FILLER, IN_TURN, PLAIN, Outcome, RoundRecord, Speculation
from .sequences import Sequences

logger = logging.get_logger(__name__)


class FaultTolerantDraft:
    """
    The draft for one call, whose failure costs speed and not tokens: after it, every speculation is empty. So are they
    while the plan is plain decoding; the draft is told of such rounds when it is asked again. A draft that was given as
    a model drafts in this process where the plan is to draft in turn, and while its worker is starting; otherwise
    speculations are empty until the worker is ready. Where several ranks hold the target, only the leader has a draft;
    the others are told its decisions and answers.

    Args:
        assistant ([`DraftAssistant`], *optional*): The worker.
        model (`PreTrainedModel`, *optional*): The draft as a model to run in this process.
        request ([`SessionRequest`]): The call.
        planner ([`Planner`]): Says what to ask for.
        device (`torch.device`): Where the target's tokens are.
        ranks ([`~hf_ssd.distributed.target_ranks.TargetRanks`]): The ranks of the target.

    Attributes:
        decides (`bool`): Whether this process decides on outcomes.
        rounds (`int`): How many speculations there were.
        joined_at (`int`, *optional*): How many of them before a draft was there, if it was asked for; `None` if it is
            not there.
        failure (`str`, *optional*): Why the draft was given up, if it was.
    """

    def __init__(self, assistant, model, request: SessionRequest, planner: Planner, device: torch.device, ranks):
        self.assistant, self.model, self.request, self.planner = assistant, model, request, planner
        self.device, self.ranks, self.decides = device, ranks, ranks.is_leader
        self.process, self.turn = os.getpid(), Turn()
        self.session: DraftSession | None = None
        self.untold: Outcome | None = None  # since the session was asked last
        self.unasked: list[list[int]] | None = None  # what is verified, if the session did not propose it
        self.is_local = self.is_asked = self.was_late = False
        self.filler: int | None = None
        self.positions = None if model is None else last_position_limit(model)  # which looks at all layers
        self.lengths = [len(prompt) for prompt in request.prompts]  # of the rows, as tokens of the target
        self.rounds = 0
        self.is_over: DraftError | None = None  # to be raised where all ranks are told
        self.joined_at: int | None = None
        self.failure: str | None = None

    @property
    def _wants_worker(self) -> bool:
        is_planned = self.planner.plan.mode == AHEAD or self.planner.profiles
        return self.assistant is not None and (is_planned or self.model is None)

    def open(self, patience: float) -> None:
        """
        Begins the call. Whatever happens, [`~FaultTolerantDraft.close`] must follow.

        Args:
            patience (`float`): Seconds to wait for a worker that is starting, before the call goes on without it.
        """
        if not self.decides:
            return
        if self.assistant is not None:
            timeout = self.request.config.timeout
            self._attempt(lambda: self.assistant.begin_call(self.turn, timeout, patience))
        self.planner.begin_call()  # not before, because another thread's call may have measured the pair meanwhile
        self._join(None)

    # ---------------------------------------------------------------- sessions

    def _join(self, sequences: Sequences | None) -> None:
        """
        Opens the session that the plan asks for, if it is not open and its draft is ready. The draft reads the rows
        while the target verifies one token of each, and answers to what comes out of that.
        """
        is_right = self.session is not None and self.is_local != self._wants_worker
        is_plain = self.planner.plan.mode == PLAIN
        if is_right or self.failure is not None or (is_plain and not self.planner.profiles):
            return
        session = None
        if self._wants_worker:
            request = functools.partial(self._request_now, sequences, self.planner.profiles)
            session = self._attempt(lambda: self.assistant.open_session(self.turn, request, self.device))
        is_local, may_draft_here = False, self.model is not None and not self.is_local and not is_plain
        if session is None and self.failure is None and may_draft_here:
            session, is_local = self._attempt(lambda: LocalSession(self.model, self._request_now(sequences))), True
        if session is not None:
            if self.session is not None:
                self.session.close()
            self.session, self.is_local, self.untold, self.is_asked = session, is_local, None, False
            if self.planner.profiles and not is_local:
                self.planner.begin_profile()
            if self.joined_at is None:
                self.joined_at = self.rounds if self.was_late else 0
        self.was_late = self.was_late or self.session is None

    def _request_now(self, sequences: Sequences | None, profile: bool = False) -> SessionRequest:
        """For a draft that joins late, what was generated before is part of the prompts."""
        prompts = self.request.prompts
        if sequences is not None:
            generated = zip(sequences.ids, sequences.lengths)
            generated = [ids[sequences.prompt_length : length] for ids, length in generated]
            prompts = [torch.cat([prompt, new.to(prompt.device)]) for prompt, new in zip(prompts, generated)]
        return dataclasses.replace(self.request, prompts=prompts, plan=self.planner.plan, profile=profile)

    # ---------------------------------------------------------------- a round

    def send_outcome(self, outcome: Outcome | None) -> Outcome:
        """
        Tells the draft, unless the plan is plain decoding, and the other ranks, what was decided.

        Args:
            outcome ([`~hf_ssd.rounds.Outcome`], *optional*): Where it was decided.

        Returns:
            [`~hf_ssd.rounds.Outcome`]: On every rank.
        """
        if self.is_over is not None:
            error, self.is_over = self.is_over, None  # nothing holds it then
            raise error
        if self.decides:
            plan, self.is_asked, self.filler = self.planner.plan, False, None
            self.lengths = [n + max(0, k + 1) for n, k in zip(self.lengths, outcome.accepted)]
            if self.session is not None:
                self.untold = outcome if self.untold is None else self.untold.followed_by(outcome, self.unasked)
                self.filler = None if self.is_local else self.planner.next_filler()
                # A worker that is to give way to this process is not asked any more.
                is_right = self.is_local or self._wants_worker
                self.is_asked = self.filler is None and plan.mode != PLAIN and is_right and not self._is_at_its_end()
            if self.is_asked:
                if self.is_local:
                    plan = dataclasses.replace(plan, mode=IN_TURN, budget=0)
                untold, self.untold = self.untold, None
                self._attempt(lambda: self.session.send_outcome(untold, plan))
        if self.ranks.size == 1:
            return outcome
        payload = [*outcome.accepted, *outcome.bonus] if self.decides else None
        message = self.ranks.share(Message(Kind.OUTCOME, payload=payload) if self.decides else None)
        numbers, rows = wire.integers(message.payload, 2), len(self.request.prompts)
        return Outcome(numbers[:rows], numbers[rows:])

    def _is_at_its_end(self) -> bool:
        """Whether the longest row has all positions that the draft has."""
        positions = getattr(self.assistant, "positions", None) if self.model is None else self.positions
        if positions is None or max(self.lengths) < positions:
            return False
        logger.warning_once(f"The draft has {positions} positions; what is longer is decoded plainly.")
        return True

    def receive_speculation(self, sequences: Sequences) -> Speculation:
        """
        Returns what to verify next.

        Args:
            sequences ([`Sequences`]): The rows, with what the last outcome gave.
        """
        self.rounds += 1
        speculation = None
        if self.decides:
            self._join(sequences)
            if self.is_asked and self.session is not None:
                speculation = self._attempt(lambda: self.session.receive_speculation())
                if speculation is not None and self.planner.profiles and not self.is_local:
                    self.planner.observe_profile(speculation.costs)
            elif self.filler is not None:
                speculation = self._filler(sequences.last)
            if speculation is None:
                speculation = Speculation.empty(len(self.request.prompts))
            self.unasked = None if self.is_asked else speculation.tokens
        if self.ranks.size == 1:
            return speculation
        payload = wire.write_speculation(speculation) if self.decides else None
        message = self.ranks.share(Message(Kind.SPECULATION, payload=payload) if self.decides else None)
        return wire.read_speculation(message.payload, len(self.request.prompts))

    def _filler(self, last: torch.LongTensor) -> Speculation:
        """Returns certain tokens that are hardly right: verifying them is a plain step whose pass is wider."""
        tokens = [[token] * self.filler for token in last.tolist()]
        return Speculation(tokens, None, RoundRecord(PLAIN, self.filler, sources=[FILLER] * len(tokens)))

    def receive_probabilities(self) -> torch.FloatTensor | None:
        """
        Where outcomes are decided, what the tokens were drawn from, or `None` if that is lost. Several ranks end the
        call together, with the next outcome.
        """
        try:
            return self._attempt(lambda: self.session.receive_probabilities()) if self.session is not None else None
        except DraftError as error:
            if self.ranks.size == 1:
                raise
            self.is_over = error
            return None

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
            if self.assistant is not None:
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
