"""The user's own fallback, an object that lives in the target's process, as the draft asks for its proposals."""

import torch

from ..speculation.fallback import CustomBackup
from . import payloads
from .conversation import Conversation
from .messages import Kind, Message
from .session import SessionRequest


class UserFallback:
    """
    Keeps the verified tokens of each row, and proposes from them.

    Args:
        request ([`SessionRequest`]): The call, whose config has the object.
        vocab_size (`int`): Of both models.
    """

    def __init__(self, request: SessionRequest, vocab_size: int):
        self.backup = CustomBackup(request.config.fallback, vocab_size)
        self.rows = [prompt.tolist() for prompt in request.prompts]
        self.speculation = torch.zeros(len(self.rows), 0, dtype=torch.long)

    @classmethod
    def of(cls, request: SessionRequest, vocab_size: int) -> "UserFallback | None":
        """Returns `None` where the draft needs no one's help."""
        return cls(request, vocab_size) if request.asks_target else None

    def observe_outcome(self, accepted: torch.LongTensor, bonus: torch.LongTensor) -> None:
        outcomes = zip(self.rows, accepted.tolist(), bonus.tolist(), self.speculation.tolist())
        for row, k, token, drafted in outcomes:
            if k >= 0:
                row += [*drafted[:k], token]

    def observe_speculation(self, tokens: torch.LongTensor) -> None:
        self.speculation = tokens

    def answer(self, message: Message, conversation: Conversation) -> None:
        """Sends the draft the proposals that it asked for."""
        with conversation.expecting_sense():
            rows, lookahead = payloads.payload_to_backup_request(message.payload, len(self.rows))
        lengths = [len(row) for row in self.rows]
        ids = torch.tensor([row + [0] * (max(lengths) - len(row)) for row in self.rows])
        proposal = self.backup.propose(ids, lengths, rows, lookahead)
        conversation.send(Kind.BACKUP, payloads.proposal_to_payload(proposal))
        if proposal.probabilities is not None:
            conversation.send(Kind.PROBABILITIES, payloads.probabilities_to_payload(proposal.probabilities))
