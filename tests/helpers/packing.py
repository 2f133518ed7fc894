"""With `HF_SSD_PACK_WEIGHTS=1` in the environment, whole suites run with all weights packed, programs of tests too."""

import itertools
import os

import pytest
import torch

from hf_ssd import SSDConfig
from hf_ssd.cache import packed, packed_linear

PACKS = os.environ.get("HF_SSD_PACK_WEIGHTS") == "1"
HAS_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # emulated otherwise, one product like another
needs_bfloat16 = pytest.mark.skipif(not HAS_BFLOAT16, reason="this processor has no products of bfloat16")
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)]  # of weights that can be packed


def packing(self, check=SSDConfig.__post_init__):
    self.pack_weights = True if self.pack_weights == "auto" else self.pack_weights
    check(self)


if PACKS:
    SSDConfig.__post_init__ = packing


def count_calls(monkeypatch, *kinds) -> list[int]:
    """Lets these kinds of packed modules note the number of tokens of each call in the list that is returned."""
    tokens = []
    for kind in kinds:

        def counted(self, states, *others, call=kind.__call__):
            tokens.append(states.numel() // states.shape[-1])
            return call(self, states, *others)

        monkeypatch.setattr(kind, "__call__", counted)
    return tokens


def times(monkeypatch, ours: list[float]) -> None:
    """Timings of packed products, beside 1.0 for each of torch's own."""
    monkeypatch.setattr(packed_linear, "_verdicts", {})
    monkeypatch.setattr(packed, "LEAST", 0)
    seconds, timed = itertools.cycle(ours), packed_linear._timed

    def told(call, *arguments):
        _, result = timed(call, *arguments)
        return 1.0 if call is packed_linear.linear else next(seconds), result

    monkeypatch.setattr(packed_linear, "_timed", told)
