"""A call on its way to the draft: what of it travels, and how it is read."""

import contextlib
import dataclasses

import torch
from transformers import GenerationConfig

from ..cache.kept_prefixes import AUTO
from ..config import SSDConfig
from ..drafting.request import SessionRequest
from ..drafting.vocabulary import Translation
from ..rounds import RANDOM
from . import wire
from .wire import PLAN, Field, ProtocolError

# Settings that do not affect proposals; some of them are objects.
NOT_FOR_THE_DRAFT = ("compile_config", "cache_config", "watermarking_config", "continuous_batching_config")
KEPT = "kept"  # a translation that the worker has from an earlier call
MOST_WORKERS, MOST_TOKENS = 1024, 2**22
NUMBERS = {
    "seed": Field(0, 2**31 - 1),
    "vocab_size": Field(1, MOST_TOKENS),
    "worker_index": Field(0, MOST_WORKERS - 1),
    "num_workers": Field(1, MOST_WORKERS),
    "prompt_length": Field(),
    "weights_version": Field(),
    "has_half": Field(0, 1, read=bool),
    "keep_prefixes": Field(AUTO),
}


@contextlib.contextmanager
def raised_as(kind: type[Exception], what: str):
    """Raises any exception as one of this kind: a model, and transformers that reads a damaged value, may raise any."""
    try:
        yield
    except Exception as error:
        raise kind(f"{what} {type(error).__name__}: {error}") from error


def write_request(request: SessionRequest) -> dict:
    """Returns everything as [`~wire.pack`] can send it, except a translation, which is `KEPT`."""
    config = request.config
    if not isinstance(config.fallback, str):  # all proposers in the target's process are one to the draft
        config = dataclasses.replace(config, fallback=RANDOM)
    return {
        "ssd_config": config.to_dict(),
        "generation_config": settings_of(request.generation_config),
        "prompts": [prompt.tolist() for prompt in request.prompts],
        "translation": None if request.translation is None else KEPT,
        "plan": wire.write_fields(PLAN, request.plan),
        "numbers": wire.write_fields(NUMBERS, request),
    }


def read_request(values: dict, translation: Translation | None, draft_size: int) -> SessionRequest:
    """Reads a call, or raises [`ProtocolError`]. It may mean the `translation` again that came last."""
    with raised_as(ProtocolError, "a call cannot be read:"):
        generation_config = read_options(values["generation_config"])
        config = SSDConfig.from_dict(values["ssd_config"])
        plan, numbers, new, prompts = (values[name] for name in ("plan", "numbers", "translation", "prompts"))
        if new not in (None, KEPT):
            translation = Translation.from_tensor(torch.tensor(new, dtype=torch.long), draft_size)
    plan, numbers = wire.read_plan(plan), wire.read_fields(NUMBERS, numbers, "a call")
    vocab_size = numbers["vocab_size"]
    if numbers["worker_index"] >= numbers["num_workers"]:
        raise ProtocolError(f"a call cannot have {numbers}")
    if new is None:
        translation = None
    elif translation is None or len(translation.pieces) != vocab_size:
        raise ProtocolError(f"a call translates {vocab_size} tokens, and no such translation has come")
    if type(prompts) is not list or not prompts or any(prompts) != all(prompts):  # rows that join later have none
        raise ProtocolError(f"a call cannot have the prompts {prompts!r:.100}")
    rows = wire.read_tokens(prompts, len(prompts), MOST_TOKENS, vocab_size)
    prompts = [torch.tensor(row, dtype=torch.long) for row in rows]
    return SessionRequest(config, generation_config, prompts, translation=translation, plan=plan, **numbers)


def settings_of(generation_config: GenerationConfig) -> dict:
    """Returns the settings that affect proposals as JSON can hold them."""
    # Values under names with an underscore are tensors that transformers derives anew on each side.
    known = vars(GenerationConfig()).keys() - {*NOT_FOR_THE_DRAFT}  # attributes of the user's own can be anything
    settings = {k: v for k, v in vars(generation_config).items() if k in known and not k.startswith("_")}
    if isinstance(settings.get("sequence_bias"), dict):  # transformers also accepts pairs, which JSON can hold
        settings["sequence_bias"] = [[list(tokens), bias] for tokens, bias in settings["sequence_bias"].items()]
    return settings


def read_options(settings: dict) -> GenerationConfig:
    with raised_as(ProtocolError, "settings cannot be read:"):
        return GenerationConfig.from_dict(settings)
