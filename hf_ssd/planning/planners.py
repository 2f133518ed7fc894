"""What this process knows of each pair of models, from which each call's planner starts."""

import dataclasses
import threading
import weakref

from ..config import SSDConfig
from .cost_model import LOOKAHEADS
from .experience import Durations, Experience
from .planner import Planner

KINDS_KEPT = 32  # of calls with a pair; a service may meet a new temperature in each call


class PairKnowledge:
    """
    What calls with one pair have taught.

    Attributes:
        durations (`dict`): [`Durations`] by batch size, length and whether there are graphs.
        experience (`dict`): [`Experience`] by settings, batch size, length and temperature.
        last ([`Planner`], *optional*): That of the last call.
        lock (`threading.Lock`): Held while any of it is read or written.
    """

    def __init__(self):
        self.durations: dict[tuple, Durations] = {}
        self.experience: dict[tuple, Experience] = {}
        self.last: Planner | None = None
        self.lock = threading.Lock()


_pairs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_lock = threading.Lock()


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
    Returns a planner for one call, which knows what calls before have taught for as long as both models live.

    Args:
        target (`PreTrainedModel`): The target.
        draft (`PreTrainedModel` or [`~hf_ssd.distributed.assistant.DraftAssistant`]): The draft.
        config (`SSDConfig`), generation_config (`GenerationConfig`): The call's.
        rows (`int`): Batch size.
        length (`int`): Tokens of the longest prompt; calls within a factor of 4 share what is known of them.
        vocab_size (`int`): Of both models.
        is_parallel (`bool`, *optional*): Whether the draft gives all tokens of its branches in one forward pass.
    """
    with _lock:
        known = _pairs.setdefault(target, weakref.WeakKeyDictionary()).setdefault(draft, PairKnowledge())
    sampled = bool(generation_config.do_sample)
    temperature = generation_config.temperature if sampled else None
    fallback = config.fallback if isinstance(config.fallback, str) else "custom"
    settings = repr(dataclasses.replace(config, fallback="auto")), fallback, is_parallel
    size = rows, length.bit_length() // 2
    with known.lock:
        durations = _kept(known.durations, (*size, is_parallel, config.cuda_graphs), Durations)
        experience = _kept(
            known.experience,
            (*settings, *size, temperature),
            lambda: Experience(config, max(LOOKAHEADS), sampled, is_parallel),
        )
        workers = len(getattr(draft, "workers", [None]))
        planner = Planner(
            config, rows, vocab_size, sampled, workers, is_parallel, durations, experience, known.lock
        )  # fmt: skip
        known.last = planner
    return planner


def _kept(known: dict, key: tuple, make):
    """Returns the value of this key, made if it is new, as the latest of those that are kept."""
    known[key] = known.pop(key, None) or make()
    if len(known) > KINDS_KEPT:
        del known[next(iter(known))]
    return known[key]


def last_planner(target, draft) -> Planner | None:
    """Returns the planner of the last call with this pair, whose costs tell what was measured of it."""
    known = _pairs.get(target, {}).get(draft)
    return None if known is None else known.last
