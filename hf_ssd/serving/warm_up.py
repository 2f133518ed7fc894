"""A first answer that nobody asked for, so that the first client does not wait for what only a first call does."""

import time

import torch
from transformers import PreTrainedModel

from ..distributed.assistant import DraftAssistant
from .calls import Call, CountingStreamer, TurnTaking
from .limits import positions_of
from .metrics import Totals

PATIENCE = 60.0  # seconds for the draft's worker to start
POLL = 0.05  # polling interval in seconds
TOKENS = 24  # enough for the planner to have measured both models
LONGEST = 20.0  # seconds, in which a slow model answers with fewer tokens
PROMPT = "The quick brown fox jumps over the lazy dog."


def warm_up(calls: TurnTaking, model: PreTrainedModel, tokenizer, assistant: DraftAssistant | None, call: Call) -> None:
    """Waits for the draft's worker and generates a few tokens, in the thread that generates."""
    streamer, deadline = CountingStreamer(calls, call, None, Totals()), time.monotonic() + PATIENCE
    while getattr(assistant, "state", None) == "starting" and time.monotonic() < deadline:
        streamer.check()
        time.sleep(POLL)
    tokens, positions = tokenizer(PROMPT)["input_ids"][:8] or [0], positions_of(model)
    input_ids = torch.tensor([tokens], device=model.device)
    model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        do_sample=False,
        max_new_tokens=TOKENS if positions is None else min(TOKENS, positions - len(tokens)),
        max_time=LONGEST,
        streamer=streamer,
    )
