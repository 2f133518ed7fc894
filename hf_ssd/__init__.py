"""Speculative speculative decoding (SSD) as a generation strategy of Hugging Face transformers."""

from .config import SSDConfig
from .distributed.assistant import DraftAssistant
from .distributed.launch import close, launch_draft
from .distributed.session import DraftError
from .generation.api import SSDGenerationMixin, disable, enable, generate
from .generation.streaming import BatchStreamer, RoundStreamer
from .rounds import RoundRecord
from .stats import SSDDecoderOnlyOutput, SSDStats

__version__ = "0.1.0"

__all__ = [
    "BatchStreamer",
    "DraftAssistant",
    "DraftError",
    "RoundRecord",
    "RoundStreamer",
    "SSDConfig",
    "SSDDecoderOnlyOutput",
    "SSDGenerationMixin",
    "SSDStats",
    "close",
    "disable",
    "enable",
    "generate",
    "launch_draft",
]
