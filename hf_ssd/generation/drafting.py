"""The draft as the decoding loop uses it: it may fail, and the loop goes on."""

import torch
from transformers.utils import logging

from ..distributed.assistant import DraftAssistant
from ..distributed.local import LocalSession
from ..distributed.session import Answer, DraftError, DraftSession, SessionRequest

logger = logging.get_logger(__name__)


class Draft:
    """
    The draft for one call, whose failure costs speed and not tokens: after it, every speculation is empty.

    Args:
        assistant ([`DraftAssistant`] or `PreTrainedModel`): The worker, or a model to run in this process.
        request ([`SessionRequest`]): The call.
    """

    def __init__(self, assistant, request: SessionRequest):
        self.config, self.batch_size = request.config, len(request.prompts)
        self.rounds = 0
        self.failure: str | None = None
        self.session: DraftSession | None = None
        self.session = self._attempt(
            lambda: (
                assistant.open_session(request)
                if isinstance(assistant, DraftAssistant)
                else LocalSession(assistant, request)
            )
        )

    def send_outcome(self, accepted: torch.LongTensor, bonus: torch.LongTensor, seconds: float, verified: int) -> None:
        self._attempt(lambda: self.session and self.session.send_outcome(accepted, bonus, seconds, verified))

    def receive_speculation(self) -> Answer:
        self.rounds += 1
        answer = self._attempt(lambda: self.session and self.session.receive_speculation())
        if answer is None:
            empty = torch.zeros(self.batch_size, 0, dtype=torch.long)
            return Answer(empty, torch.zeros(self.batch_size, dtype=torch.bool))
        return answer

    def receive_probabilities(self) -> torch.FloatTensor | None:
        return self._attempt(lambda: self.session and self.session.receive_probabilities())

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
            self.session = None

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
