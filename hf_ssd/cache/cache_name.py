"""The argument in which transformers passes a cache: `past_key_values`, and from release 5.24 on `cache`."""

import inspect

from torch import nn
from transformers.generation.utils import ALL_CACHE_NAMES

CACHE = ALL_CACHE_NAMES[0]
"""The name in `generate()`, in outputs, and in the layers of transformers' own models."""


def cache_argument(model: nn.Module) -> str:
    """Returns the argument of a model's `forward` that takes the cache. Custom code may still use the older name."""
    arguments = inspect.signature(model.forward).parameters
    return next((name for name in (CACHE, "cache", "past_key_values") if name in arguments), CACHE)
