"""The settings that all rows of a call have in common."""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList

from ..config import SSDConfig


@dataclass(frozen=True)
class Settings:
    """The settings of a call as transformers prepared them. `is_bound`: [`SSDConfig`] is that of `hf_ssd.enable`."""

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    options: GenerationConfig
    config: SSDConfig
    is_bound: bool = False

    @property
    def uses_q(self) -> bool:
        return self.config.uses_q(self.options.do_sample)

    @property
    def max_length(self) -> int | None:
        """The length at which all rows stop, or `None` if they need not."""
        limits = [int(criteria.max_length) for criteria in self.criteria if type(criteria) is MaxLengthCriteria]
        return min(limits, default=None)

    @property
    def of_the_draft(self) -> GenerationConfig:
        """The options as the draft gets them, with the length at which rows stop."""
        options = copy.copy(self.options)
        options.max_length = self.max_length
        return options

    @property
    def pad_token(self) -> int:
        token = getattr(self.options, "_pad_token_tensor", None)
        return 0 if token is None else int(token)

    @property
    def forced(self) -> Callable[[int, list[int]], list[int]] | None:
        """A function, as [`~hf_ssd.Grammar`] has: the tokens that must follow in a row once it has gained some."""
        return next((processor.forced for processor in self.processors if hasattr(processor, "forced")), None)

    @property
    def patience(self) -> float:
        """
        The seconds to wait for a worker that is starting: rounds before it is ready draw other numbers than a seed
        must repeat in a call that samples with a fixed lookahead, unless it is coupled.
        """
        if not self.uses_q or self.config.lookahead == "auto":
            return 0.0
        clocks = [criteria for criteria in self.criteria if isinstance(criteria, MaxTimeCriteria)]
        return min((clock.initial_timestamp + clock.max_time - time.time() for clock in clocks), default=math.inf)
