"""Examines a pair before its weights are loaded, by its configs, tokenizers and devices, and tries the processor."""

import os
from collections import Counter

import torch
from torch import nn
from transformers import PreTrainedModel

from ..cache.packed import forward_of
from ..cache.support import attention_layout
from ..config import WITHOUT_DRAFT
from ..distributed.cores import available_cores
from ..drafting.heads.loading import structure_at
from ..drafting.resolver import for_worker
from ..generation.checks import check_arguments
from ..generation.tokenizers import translation_for
from .methods import time_of
from .models import Model, Models
from .verdict import BUSY, in_lines

TOKENS = (1, 5)  # of a plain step, and of a verification
FASTER = 1.2  # speed over the other dtype, for each number of tokens, from which it is called faster
UNCACHED = 2**27  # bytes that do not fit into the caches of a processor, so that weights come from memory as in a model


def examine(models: Models, tries_dtypes: bool = False) -> dict:
    """Returns a description of each model and of the pair, or raises `ValueError` if the two do not fit."""
    target = models.target.structure()
    known = {"target": describe(target, models.target)}
    if models.draft is not None:
        draft = structure_at(models.draft.name, target) or models.draft.structure()
        for_worker(draft)
        resolved = check_arguments(target, draft, models.config, synced_gpus=False)
        translation_for(target, resolved, **models.tokenizers)
        known |= {"draft": describe(draft, models.draft), "shares_memory": models.shares_memory}
    elif models.config.drafter in WITHOUT_DRAFT:
        check_arguments(target, None, models.config, synced_gpus=False)
    if tries_dtypes:
        known["fastest_dtype"] = fastest(target, models.target.device)
    return known


def load() -> float:
    """Returns the mean number of running programs for each core over the last minute, or 0 if that is not known."""
    return os.getloadavg()[0] / len(available_cores()) if hasattr(os, "getloadavg") else 0.0


def describe(model: PreTrainedModel, named: Model) -> dict:
    config, layout = model.config.get_text_config(decoder=True), attention_layout(model)
    window = layout.window and f"windows of {layout.window} tokens"
    kinds = [None if window and not layout.mixed else "full", window, layout.recurrent and "recurrent"]
    special = {name: getattr(config, name, None) for name in ("target_layers", "pard_token")}
    return {
        "name": named.name,
        "family": config.model_type,
        "parameters": model.num_parameters(),
        "layers": config.num_hidden_layers,
        "attention": " and ".join(filter(None, kinds)),
        "vocabulary": config.vocab_size,
        "device": str(named.device),
        "dtype": str(config.dtype or "float32").removeprefix("torch.") if named.dtype == "auto" else named.dtype,
        **{name: value for name, value in special.items() if value is not None},
    }


def in_words(known: dict) -> str:
    """Returns the result of [`examine`], and the `load` of the machine if it is known, as lines of text."""
    lines = {}
    for side in [name for name in ("target", "draft") if name in known]:
        model = known[side]
        parallel = f", parallel (mask token {model['pard_token']})" if "pard_token" in model else ""
        if "target_layers" in model:
            parallel = f", a head (reads hidden states {model['target_layers']})"
        size = f"{model['parameters'] / 1e6:.1f}M parameters, {model['layers']} layers, attention {model['attention']}"
        place = f"{model['vocabulary']} tokens, on {model['device']} in {model['dtype']}{parallel}"
        lines[side] = f"{model['name']}: {model['family']}, {size}, {place}"
    if "shares_memory" in known:
        both = "both models share one device's memory and slow each other down"
        lines["memory"] = both if known["shares_memory"] else "each model has a device of its own"
    if "load" in known:
        busy = ", a busy machine" * (known["load"] > BUSY)
        lines["load"] = f"{known['load']:.2f} running programs for each core{busy}"
    best, loaded = known.get("fastest_dtype"), known["target"]["dtype"]
    if best not in (None, loaded):
        lines["dtype"] = f"this processor computes {best} faster than {loaded}: --dtype {best}"
    return in_lines(**lines)


def fastest(model: PreTrainedModel, device: torch.device) -> str | None:
    """Returns the dtype that is faster on the CPU for each number of tokens, if one is, also without weights."""
    if device.type != "cpu":
        return None
    shapes = Counter(tuple(layer.weight.shape) for layer in model.modules() if type(layer) is nn.Linear)
    repeated = [shape for shape, count in shapes.items() if count > 1]  # so not that of the head
    if not repeated:
        return None
    shape = max(repeated, key=lambda sizes: sizes[0] * sizes[1])
    seconds = {dtype: seconds_of(shape, shapes[shape], dtype) for dtype in (torch.float32, torch.bfloat16)}
    gains = [other / one for other, one in zip(seconds[torch.float32], seconds[torch.bfloat16])]
    if min(gains) >= FASTER:
        return "bfloat16"
    return "float32" if max(gains) <= 1 / FASTER else None


@torch.no_grad()
def seconds_of(shape: tuple[int, int], count: int, dtype: torch.dtype) -> list[float]:
    """Returns the seconds of a layer of this shape, as in a call with `count` of them, for each of `TOKENS`."""
    weight = torch.full(shape, 0.01, dtype=dtype)
    forwards = []
    for _ in range(min(count, 1 + UNCACHED // weight.nbytes)):
        layer = nn.Linear(shape[1], shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(weight.clone())
        forwards.append(forward_of(layer))

    def layers(states: torch.Tensor) -> None:
        for forward in forwards:
            forward(states)

    states = [torch.full((tokens, shape[1]), 0.01, dtype=dtype) for tokens in TOKENS]
    return [time_of(layers, weight.device, one) / len(forwards) for one in states]
