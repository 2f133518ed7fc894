"""The draft as the decoding loop uses it: it may fail, and the loop goes on."""

import torch
from transformers.utils import logging

from ..distributed import payloads
from ..distributed.assistant import DraftAssistant
from ..distributed.local import LocalSession
from ..distributed.messages import Kind, Message
from ..distributed.session import Answer, DraftError, DraftSession, SessionRequest
from ..distributed.target_ranks import TargetRanks

logger = logging.get_logger(__name__)


class Draft:
    """
    The draft for one call, whose failure costs speed and not tokens: after it, every speculation is empty. Where
    several ranks hold the target, only the leader has a draft; the others are told its decisions and its answers.

    Args:
        assistant ([`DraftAssistant`] or `PreTrainedModel`): The worker, or a model to run in this process.
        request ([`SessionRequest`]): The call.
        device (`torch.device`): Where the target's tokens are.
        ranks ([`TargetRanks`]): The ranks of the target.
    """

    def __init__(self, assistant, request: SessionRequest, device: torch.device, ranks: TargetRanks):
        self.config, self.batch_size, self.ranks = request.config, len(request.prompts), ranks
        self.rounds = 0
        self.failure: str | None = None
        self.session: DraftSession | None = None
        if ranks.is_leader:
            self.session = self._attempt(
                lambda: (
                    assistant.open_session(request, device)
                    if isinstance(assistant, DraftAssistant)
                    else LocalSession(assistant, request)
                )
            )

    @property
    def decides(self) -> bool:
        """Whether this process decides on outcomes."""
        return self.ranks.is_leader

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
        if self.decides:
            self._attempt(lambda: self.session and self.session.send_outcome(*outcome, seconds, verified))
        if self.ranks.size == 1:
            return outcome
        payload = payloads.outcome_to_payload(*outcome, seconds, verified) if self.decides else None
        message = self.ranks.share(Message(Kind.OUTCOME, payload=payload) if self.decides else None)
        return torch.stack(payloads.payload_to_outcome(message.payload)[:2])

    def receive_speculation(self) -> Answer:
        self.rounds += 1
        answer = None
        if self.decides:
            answer = self._attempt(lambda: self.session and self.session.receive_speculation())
            if answer is None:
                empty = torch.zeros(self.batch_size, 0, dtype=torch.long)
                answer = Answer(empty, torch.zeros(self.batch_size, dtype=torch.bool))
        if self.ranks.size == 1:
            return answer
        payload = payloads.answer_to_payload(answer) if self.decides else None
        message = self.ranks.share(Message(Kind.SPECULATION, payload=payload) if self.decides else None)
        return payloads.payload_to_answer(message.payload, self.batch_size)

    def receive_probabilities(self) -> torch.FloatTensor | None:
        """Where outcomes are decided, what the tokens were drawn from, or `None` if that is lost."""
        return self._attempt(lambda: self.session and self.session.receive_probabilities())

    def finish(self, device: torch.device, sampled: bool) -> None:
        """Lets all ranks end the call with the same failure and the same random state."""
        self.failure = self.ranks.share_values(self.failure)
        if sampled:
            self.ranks.share_random_state(device)

    def close(self) -> None:
        session, self.session = self.session, None  # first: it must not be closed again if this is interrupted
        if session is not None:
            session.close()

    def _attempt(self, step):
        try:
            return step()
        except DraftError as error:
            self.close()
            if self.config.on_draft_failure == "raise":
                raise
            self.failure = str(error)
            logger.warning(f"Finishing without the draft, by plain decoding. {error}")
            return None
