"""Measurements of each pair of models in this process, from which the planner of each call starts."""

import dataclasses
import threading
import weakref

from ..config import SSDConfig
from .cost_model import LOOKAHEADS
from .experience import Durations, Experience
from .fixed_plan import FixedPlan
from .planner import Planner

KINDS_KEPT = 32  # kinds of calls that are kept for a pair; a service may meet a new temperature in each call


class PairKnowledge:
    """
    Measurements of the calls with a pair.

    Attributes:
        durations (`dict`): [`Durations`] by batch size, length, kind of draft and CUDA graphs.
        experience (`dict`): [`Experience`] by settings, batch size, length and temperature.
        last ([`Planner`], *optional*): The planner of the last call whose plan was not fixed.
        lock (`threading.Lock`): Held while any of these attributes is read or written.
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
) -> "Planner | FixedPlan":
    """
    Returns a planner for a call. It starts from the measurements of earlier calls, kept while both models live. If the
    settings fix lookahead and budget, there is nothing to measure.

    Args:
        target (`PreTrainedModel`): The target.
        draft (`PreTrainedModel` or [`~hf_ssd.distributed.assistant.DraftAssistant`]): The draft.
        config (`SSDConfig`), generation_config (`GenerationConfig`): Settings of the call.
        rows (`int`): Batch size.
        length (`int`): Tokens of the longest prompt. Measurements are shared within classes that span a factor of 4.
        vocab_size (`int`): Vocabulary size of both models.
        is_parallel (`bool`, *optional*): Whether the draft gives all tokens of its branches in one forward pass.
    """
    if config.lookahead != "auto" and config.budget != "auto":
        return FixedPlan(config)
    with _lock:
        known = _pairs.setdefault(target, weakref.WeakKeyDictionary()).setdefault(draft, PairKnowledge())
    sampled = bool(generation_config.do_sample)
    temperature = generation_config.temperature if sampled else None
    fallback = config.fallback if isinstance(config.fallback, str) else "custom"
    settings = repr(dataclasses.replace(config, fallback="auto")), fallback, is_parallel
    size = rows, length.bit_length() // 2
    with known.lock:
        durations = _kept(known.durations, (*size, is_parallel, config.cuda_graphs, config.pack_weights), Durations)
        experience = _kept(
            known.experience,
            (*settings, *size, temperature),
            lambda: Experience(config, max(LOOKAHEADS)),
        )
        workers = len(getattr(draft, "workers", [None]))
        planner = Planner(
            config, rows, vocab_size, sampled, workers, is_parallel, durations, experience, known.lock
        )  # fmt: skip
        known.last = planner
    return planner


def _kept(known: dict, key: tuple, make):
    """Returns the value of this key, made if it is new, as the latest entry; drops the oldest of too many entries."""
    known[key] = known.pop(key, None) or make()
    if len(known) > KINDS_KEPT:
        del known[next(iter(known))]
    return known[key]


def last_planner(target, draft) -> Planner | None:
    """Returns the planner of the last planned call with this pair, whose `costs` hold the measurements."""
    known = _pairs.get(target, {}).get(draft)
    return None if known is None else known.last
