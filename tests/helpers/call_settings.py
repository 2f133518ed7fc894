"""The settings of a call, for tests of a part of the loop."""

from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

import hf_ssd
from hf_ssd.generation.settings import Settings


def call_settings(processors=(), max_length=50, **options) -> Settings:
    """Returns settings of a call with these processors and options of `generate()`."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length)])
    return Settings(LogitsProcessorList(processors), criteria, GenerationConfig(**options), hf_ssd.SSDConfig())
