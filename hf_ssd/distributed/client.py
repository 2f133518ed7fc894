"""The target's end of a conversation with a draft worker."""

import contextlib
import time
from collections.abc import Callable

import torch

from ..speculation.fallback import CustomBackup
from . import messages
from .channel import PeerLost
from .messages import Kind, Message, ProtocolError
from .process import WorkerProcess
from .session import Answer, DraftError, DraftSession, SessionRequest


class WorkerSession(DraftSession):
    """
    One generate() call's conversation with a worker.

    Args:
        worker ([`WorkerProcess`]): The worker, at rest.
        number (`int`): Number of the session. Answers to other numbers are late ones, and dropped.
        request ([`SessionRequest`]): The call.
        on_close (`Callable`): Called once, when the conversation is over.
    """

    def __init__(self, worker: WorkerProcess, number: int, request: SessionRequest, on_close: Callable[[], None]):
        self.worker, self.number, self.on_close = worker, number, on_close
        self.batch_size, self.timeout = len(request.prompts), request.config.timeout
        self.round, self.shape = -1, (0,)
        self.worker_is_sound = True
        self.backup = self.history = None
        if request.asks_target:
            self.backup = CustomBackup(request.config.fallback, worker.facts["vocab_size"])
            self.history = _History(request.prompts)
        send = worker.channel.send
        send(Message(Kind.START, number, payload=messages.json_to_payload(request.to_dict())))
        send(Message(Kind.PROMPTS, number, payload=messages.prompts_to_payload(request.prompts)))

    def send_outcome(self, accepted: torch.LongTensor, bonus: torch.LongTensor, seconds: float, verified: int) -> None:
        self.round += 1
        self._send(Kind.OUTCOME, messages.outcome_to_payload(accepted, bonus, seconds, verified))
        if self.history is not None:
            self.history.outcome(accepted.tolist(), bonus.tolist())

    def receive_speculation(self) -> Answer:
        message = self._receive(Kind.SPECULATION, Kind.BACKUP_REQUEST)
        if message.kind == Kind.BACKUP_REQUEST:
            with self._expecting_sense():
                rows, lookahead = messages.payload_to_backup_request(message.payload, self.batch_size)
            self._propose(rows, lookahead)
            message = self._receive(Kind.SPECULATION)
        with self._expecting_sense():
            answer = messages.payload_to_answer(message.payload, self.batch_size)
        self.shape = (*answer.tokens.shape, self.worker.facts["vocab_size"])
        self.worker_is_sound = False
        self.worker.channel.expect()  # probabilities may arrive while the target computes
        self.worker_is_sound = True
        if self.history is not None:
            self.history.speculation = answer.tokens
        return answer

    def receive_probabilities(self) -> torch.FloatTensor:
        message = self._receive(Kind.PROBABILITIES)
        with self._expecting_sense():
            return messages.payload_to_probabilities(message.payload, self.shape)

    def _propose(self, rows: list[int], lookahead: int) -> None:
        """Asks the user's own fallback, whose object lives in this process."""
        proposal = self.backup.propose(*self.history.ids_and_lengths(), rows, lookahead)
        self._send(Kind.BACKUP, messages.proposal_to_payload(proposal))
        if proposal.probabilities is not None:
            self._send(Kind.PROBABILITIES, messages.probabilities_to_payload(proposal.probabilities))

    def _send(self, kind: Kind, payload: torch.Tensor) -> None:
        self.worker_is_sound = False  # until all is sent: an interrupt must not leave half a message
        self.worker.channel.send(Message(kind, self.number, self.round, payload))
        self.worker.channel.expect()
        self.worker_is_sound = True

    def _receive(self, *kinds: Kind) -> Message:
        deadline = time.monotonic() + self.timeout
        self.worker_is_sound = False  # until it has answered
        try:
            while True:
                with self._expecting_sense():
                    message = self.worker.channel.receive(max(0.0, deadline - time.monotonic()))
                if message.session == self.number:
                    break
            if message.kind == Kind.ERROR:
                traceback = messages.payload_to_text(message.payload)
                self.worker_is_sound = "CUDA error" not in traceback  # after one, nothing on that device works again
                raise DraftError(f"The draft worker raised:\n{traceback}")
            with self._expecting_sense():
                messages.expect(message, message.kind if message.kind in kinds else kinds[0], self.number, self.round)
        except TimeoutError:
            raise DraftError(f"The draft worker did not answer within {self.timeout:g} s.") from None
        except PeerLost as error:
            raise DraftError(f"The draft worker has ended. {self.worker.last_words()}".strip()) from error
        self.worker_is_sound = True
        return message

    @contextlib.contextmanager
    def _expecting_sense(self):
        try:
            yield
        except ProtocolError as error:
            self.worker_is_sound = False
            raise DraftError(f"The draft worker sent something unexpected: {error}") from error

    def close(self) -> None:
        try:
            if self.worker_is_sound and self.worker.is_alive:
                self.worker.channel.send(Message(Kind.END, self.number))
            else:
                self.worker.kill()  # the next call starts another one
        finally:
            self.on_close()


class _History:
    """The verified tokens of each row, for a fallback that looks at them."""

    def __init__(self, prompts: list[torch.LongTensor]):
        self.rows = [prompt.tolist() for prompt in prompts]
        self.speculation = torch.zeros(len(prompts), 0, dtype=torch.long)

    def outcome(self, accepted: list[int], bonus: list[int]) -> None:
        for row, k, token, drafted in zip(self.rows, accepted, bonus, self.speculation.tolist()):
            if k >= 0:
                row += [*drafted[:k], token]

    def ids_and_lengths(self) -> tuple[torch.LongTensor, list[int]]:
        lengths = [len(row) for row in self.rows]
        return torch.tensor([row + [0] * (max(lengths) - len(row)) for row in self.rows]), lengths
