"""The draft in the target's own process: ordinary, synchronous speculative decoding."""

import contextlib
import time
import weakref
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from ..speculation.experience import Experience
from ..speculation.fallback import CustomBackup, Proposal
from ..speculation.speculator import Speculator
from .session import Answer, DraftError, DraftSession, SessionRequest


class LocalSession(DraftSession):
    """
    Drafts when asked, in turn with the target. Nothing is prepared, so no row ever hits.

    Args:
        model (`PreTrainedModel`): The draft model.
        request (`SessionRequest`): The call.
    """

    def __init__(self, model: PreTrainedModel, request: SessionRequest):
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        self.backup = _UserBackup(request.config.fallback, vocab_size) if request.asks_target else None
        with self._as_draft_errors():
            self.speculator: Speculator | None = Speculator(
                model,
                request.config,
                request.generation_config,
                request.prompts,
                request.seed,
                _experiences.setdefault(model, Experience()),
                self.backup,
            )
            self.speculator.prefill()

    def send_outcome(self, accepted: torch.LongTensor, bonus: torch.LongTensor, seconds: float, verified: int) -> None:
        self.outcome = (accepted, bonus, seconds, verified)

    def receive_speculation(self) -> Answer:
        start = time.perf_counter()
        with self._as_draft_errors():
            self.speculation = self.speculator.answer(*self.outcome)
            self.speculator.prepare()  # nothing but the plan for the next round
        elapsed = time.perf_counter() - start
        return Answer(self.speculation.tokens, self.speculation.hits, elapsed, elapsed, answered_at=start)

    def receive_probabilities(self) -> torch.FloatTensor:
        return self.speculation.probabilities

    def close(self) -> None:
        speculator, self.speculator = self.speculator, None
        if speculator is not None:
            speculator.end()

    @contextlib.contextmanager
    def _as_draft_errors(self) -> Iterator[None]:
        """Whatever the draft raises is a [`DraftError`], as with a worker; what the user's fallback raises is not."""
        try:
            yield
        except Exception as error:
            self.speculator = None
            if self.backup is not None and self.backup.error is error:
                raise
            raise DraftError(f"The draft raised {type(error).__name__}: {error}") from error


class _UserBackup(CustomBackup):
    """Remembers what the user's object has raised."""

    error: Exception | None = None

    def propose(self, *arguments) -> Proposal:
        try:
            return super().propose(*arguments)
        except Exception as error:
            self.error = error
            raise


_experiences: "weakref.WeakKeyDictionary[PreTrainedModel, Experience]" = weakref.WeakKeyDictionary()
