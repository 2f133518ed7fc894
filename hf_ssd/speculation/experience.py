"""What a draft has learned of the calls before, so that the next one need not start from the priors."""

import dataclasses

from transformers import GenerationConfig

from ..config import SSDConfig
from .auto_planner import planner_for
from .outcomes import CacheShape, shape_for
from .planner import Planner

KINDS_KEPT = 32  # a service may meet a new temperature in each call


class Experience:
    """Planners and cache shapes of one pair of models, by what makes a difference to them, of the latest calls."""

    def __init__(self):
        self.calls = 0
        self.known: dict[tuple, tuple[Planner, CacheShape]] = {}

    def of(
        self, config: SSDConfig, generation_config: GenerationConfig, rows: int, vocab_size: int, drafts: int
    ) -> tuple[Planner, CacheShape]:
        """
        Args:
            config (`SSDConfig`): The user's settings.
            generation_config (`GenerationConfig`): The target's.
            rows (`int`): Batch size.
            vocab_size (`int`): Of both models.
            drafts (`int`): How many share the work.

        Returns:
            The planner and the cache shape for such calls, new if there was none like it.
        """
        self.calls += 1
        sampled = bool(generation_config.do_sample)
        temperature = generation_config.temperature if sampled else None
        fallback = config.fallback if isinstance(config.fallback, str) else "custom"
        key = (repr(dataclasses.replace(config, fallback="auto")), fallback, rows, sampled, temperature, drafts)
        known = self.known.pop(key, None)
        if known is None:
            known = planner_for(config, rows, vocab_size, sampled, drafts), shape_for(config)
        self.known[key] = known  # the last one now
        if len(self.known) > KINDS_KEPT:
            del self.known[next(iter(self.known))]
        known[0].begin()
        return known
