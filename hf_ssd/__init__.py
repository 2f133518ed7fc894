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

_PLACES = {
    "BatchStreamer": ".generation.streaming",
    "DraftAssistant": ".distributed.assistant",
    "DraftError": ".distributed.sessions",
    "RoundRecord": ".rounds",
    "RoundStreamer": ".generation.streaming",
    "SSDConfig": ".config",
    "SSDDecoderOnlyOutput": ".stats",
    "SSDGenerationMixin": ".generation.api",
    "SSDStats": ".stats",
    "close": ".distributed.launch",
    "disable": ".generation.api",
    "enable": ".generation.api",
    "generate": ".generation.api",
    "launch_draft": ".distributed.launch",
}


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
