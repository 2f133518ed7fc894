"""Compiling a draft before its first call, so that no call has to wait for it."""

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..cache.compiled import why_not_compiled
from ..config import SSDConfig
from ..rounds import AHEAD, Outcome, Plan
from .drafts import Drafts
from .heads.base import Head
from .request import SessionRequest

PROMPT_LENGTH = 8  # tokens, an arbitrary number


@torch.inference_mode()
def compile_draft(model: PreTrainedModel) -> str | None:
    """Compiles the forward pass and drafts a few tokens. Returns why the model is as before, or `None`."""
    if isinstance(model, Head):
        return "it reads hidden states of the target"
    config, generation_config = SSDConfig(lookahead=3, budget=4), GenerationConfig(max_length=2 * PROMPT_LENGTH)
    plan, vocab_size = Plan(AHEAD, 3, 3, 4), model.config.get_text_config(decoder=True).vocab_size
    try:
        model.forward = torch.compile(model.forward, dynamic=True)  # marks the model as compiled
        for rows in (1, 2):  # torch.compile treats a size of 1 as a separate case
            prompts = [torch.arange(PROMPT_LENGTH)] * rows
            speculator = Drafts().speculator(model, SessionRequest(config, generation_config, prompts, 0, vocab_size))
            speculator.drafter.begin()
            speculator.prepare(plan)
            outcome = Outcome([[0]] * rows)
            for _ in range(2):
                speculator.answer(outcome, plan)
                speculator.prepare(plan)
        reason = why_not_compiled(model)
    except Exception as error:  # compilers raise errors of many types
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    if reason is not None:
        del model.forward
    return reason
