"""Which dtype this machine's processor computes fastest, found by trying one layer of a model."""

import time
from collections import Counter

import torch
from torch.nn import functional
from transformers import PreTrainedModel

TOKENS = (1, 5)  # of a plain step, and of a verification
TURNS = 5
GAIN = 1.2  # speed over the other dtype, for each number of tokens, from which it is called faster
ENOUGH = 2**27  # bytes that do not fit into the caches of a processor, so that weights come from memory as in a model


def fastest(model: PreTrainedModel, device: torch.device) -> str | None:
    """Returns the dtype that is faster on the CPU for each number of tokens, if one is, also without weights."""
    if device.type != "cpu":
        return None
    shapes = Counter(tuple(layer.weight.shape) for layer in model.modules() if type(layer) is torch.nn.Linear)
    repeated = [shape for shape, count in shapes.items() if count > 1]  # so not that of the head
    if not repeated:
        return None
    shape = max(repeated, key=lambda sizes: sizes[0] * sizes[1])
    seconds = {dtype: seconds_of(shape, shapes[shape], dtype) for dtype in (torch.float32, torch.bfloat16)}
    gains = [other / one for other, one in zip(seconds[torch.float32], seconds[torch.bfloat16])]
    if min(gains) >= GAIN:
        return "bfloat16"
    return "float32" if max(gains) <= 1 / GAIN else None


@torch.no_grad()
def seconds_of(shape: tuple[int, int], count: int, dtype: torch.dtype) -> list[float]:
    """Returns the least seconds of up to `count` layers with weights of this shape, for each of `TOKENS`."""
    weight = torch.full(shape, 0.01, dtype=dtype)
    weights = [weight.clone() for _ in range(min(count, 1 + ENOUGH // weight.nbytes))]
    quickest = []
    for tokens in TOKENS:
        states, times = torch.full((tokens, shape[1]), 0.01, dtype=dtype), []
        for _ in range(TURNS):
            start = time.perf_counter()
            for weight in weights:
                functional.linear(states, weight)
            times.append(time.perf_counter() - start)
        quickest.append(min(times))
    return quickest
