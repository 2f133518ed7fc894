"""Speculative speculative decoding (SSD) as a generation strategy of Hugging Face transformers."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for readers of the source; at run time `__getattr__` imports each name when it is first used
    from . import distributed as distributed
    from . import theory as theory
    from .config import SSDConfig
    from .distributed.assistant import DraftAssistant
    from .distributed.launch import close, launch_draft
    from .distributed.sessions import DraftError
    from .generation.api import SSDGenerationMixin, disable, enable, generate
    from .generation.continuous import BatchIsFull, ContinuousBatching, continuous_batching
    from .generation.streaming import BatchStreamer, RoundStreamer
    from .grammar import Grammar
    from .rounds import RoundRecord
    from .stats import SSDDecoderOnlyOutput, SSDStats

__version__ = "0.1.0"

__all__ = [
    "BatchIsFull", "BatchStreamer", "ContinuousBatching", "DraftAssistant", "DraftError", "Grammar", "RoundRecord",
    "RoundStreamer", "SSDConfig", "SSDDecoderOnlyOutput", "SSDGenerationMixin", "SSDStats", "close",
    "continuous_batching", "disable", "enable", "generate", "launch_draft",
]  # fmt: skip

_NAMES = {
    ".config": ("SSDConfig",),
    ".distributed.assistant": ("DraftAssistant",),
    ".distributed.launch": ("close", "launch_draft"),
    ".distributed.sessions": ("DraftError",),
    ".generation.continuous": ("BatchIsFull", "ContinuousBatching", "continuous_batching"),
    ".generation.api": ("SSDGenerationMixin", "disable", "enable", "generate"),
    ".generation.streaming": ("BatchStreamer", "RoundStreamer"),
    ".grammar": ("Grammar",),
    ".rounds": ("RoundRecord",),
    ".stats": ("SSDDecoderOnlyOutput", "SSDStats"),
}
_PLACES = {name: place for place, names in _NAMES.items() for name in names}


def __getattr__(name: str):
    """Imports a public name or a documented module when it is first used: importing torch takes seconds."""
    if name in _PLACES:
        try:
            found = getattr(importlib.import_module(_PLACES[name], __name__), name)
        except ImportError as error:
            importlib.import_module(".versions", __name__).explain(error)
            raise
    elif name in ("distributed", "theory"):
        found = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "distributed", "theory"})
