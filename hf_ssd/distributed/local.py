"""The draft in the target's own process: ordinary, synchronous speculative decoding."""

import contextlib
import weakref
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from ..drafting.custom_fallback import CustomFallback
from ..drafting.speculator import Speculator
from ..rounds import Outcome, Plan, Speculation
from . import wire
from .drafts import Drafts
from .session import DraftError, DraftSession, SessionRequest


class LocalSession(DraftSession):
    """
    Drafts when asked, in turn with the target. No outcomes are prepared, so no row ever hits.

    Args:
        model (`PreTrainedModel`): The draft model.
        request ([`SessionRequest`]): The call.
    """

    def __init__(self, model: PreTrainedModel, request: SessionRequest):
        self.custom = CustomFallback(request.config.fallback, request.vocab_size) if request.asks_target else None
        with self._as_draft_errors():
            drafts = _drafts.setdefault(model, Drafts())
            self.speculator: Speculator | None = drafts.speculator(model, request, self.custom)
            self.speculator.begin()

    def send_outcome(self, outcome: Outcome, plan: Plan, features: torch.Tensor | None = None) -> None:
        self.outcome, self.plan, self.features = outcome, plan, features

    def receive_speculation(self) -> Speculation:
        with self._as_draft_errors():
            self.speculation = self.speculator.answer(self.outcome, self.plan, self._read_features)
            self.speculator.prepare(self.plan)  # in turn the budget is 0, so no outcome is prepared
        return self.speculation

    def _read_features(self, tokens: int, width: int) -> torch.Tensor:
        return wire.read_features(self.features.flatten(), tokens, width)

    def receive_probabilities(self) -> torch.FloatTensor:
        return self.speculation.probabilities

    def close(self) -> None:
        if self.speculator is not None:
            self.speculator.end()
        self.speculator = None

    @contextlib.contextmanager
    def _as_draft_errors(self) -> Iterator[None]:
        """Turns the draft's exceptions into [`DraftError`], as a worker does, but not those of the user's fallback."""
        try:
            yield
        except Exception as error:
            self.speculator = None
            if self.custom is not None and self.custom.is_asked:
                raise
            raise DraftError(f"The draft raised {type(error).__name__}: {error}") from error


_drafts: "weakref.WeakKeyDictionary[PreTrainedModel, Drafts]" = weakref.WeakKeyDictionary()
