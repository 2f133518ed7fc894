"""The planners of this process: what they know of a pair is kept from call to call."""

import dataclasses
import weakref

from ..config import SSDConfig
from .planner import Planner

PLANNERS_KEPT = 32  # of a pair; a service may meet a new temperature in each call

_planners: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def planner_for(
    target,
    draft,
    config: SSDConfig,
    generation_config,
    rows: int,
    length: int,
    vocab_size: int,
    is_parallel: bool = False,
) -> Planner:
    """
    Returns the planner of calls like this one, kept for as long as both models live.

    Args:
        target (`PreTrainedModel`): The target.
        draft (`PreTrainedModel` or [`~hf_ssd.distributed.assistant.DraftAssistant`]): The draft.
        config (`SSDConfig`), generation_config (`GenerationConfig`): The call's.
        rows (`int`): Batch size.
        length (`int`): Tokens of the longest prompt; calls within a factor of 4 share what is known of them.
        vocab_size (`int`): Of both models.
        is_parallel (`bool`, *optional*): Whether the draft gives all tokens of its branches in one forward pass.
    """
    known = _planners.setdefault(target, weakref.WeakKeyDictionary()).setdefault(draft, {})
    sampled = bool(generation_config.do_sample)
    temperature = generation_config.temperature if sampled else None
    fallback = config.fallback if isinstance(config.fallback, str) else "custom"
    settings = repr(dataclasses.replace(config, fallback="auto")), fallback
    key = (*settings, rows, length.bit_length() // 2, temperature)
    planner = known.pop(key, None)
    if planner is None:
        workers = len(getattr(draft, "workers", [None]))
        planner = Planner(config, rows, vocab_size, sampled, workers, is_parallel)
    known[key] = planner  # the last one now
    if len(known) > PLANNERS_KEPT:
        del known[next(iter(known))]
    planner.begin_call()
    return planner


def last_planner(target, draft) -> Planner | None:
    """Returns the planner of the last call with this pair, whose costs tell what was measured of it."""
    known = _planners.get(target, {}).get(draft, {})
    return next(reversed(known.values()), None)
