"""Modules whose weights are packed once, for passes of a view of the model over a few tokens on a CPU."""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedModel
from transformers.utils import logging

from .. import devices
from .attached import values_of
from .compiled import is_compiled
from .packed_experts import PackedExperts
from .packed_linear import FOR_TOKENS, TRIED, PackedLinear, Verdict, verdict_on
from .support import are_close
from .view import view_of

KINDS = (PackedLinear, PackedExperts)  # the `forward` of each kind of module that can be packed
DTYPES = (torch.float32, torch.bfloat16)
LEAST = 2**17  # values of a matrix: smaller matrices stay in the processor's cache and gain nothing
GIGABYTE = 2**30

logger = logging.get_logger(__name__)
_packed: "weakref.WeakKeyDictionary[nn.Module, Packed]" = weakref.WeakKeyDictionary()
_owned: "weakref.WeakSet[PreTrainedModel]" = weakref.WeakSet()
_lock = threading.Lock()  # so that threads do not pack a model twice


class Packed(NamedTuple):
    """A module's `forward` with packed weights, and what [`values_of`] gave for the weights when they were packed."""

    forward: PackedLinear | PackedExperts
    values: tuple


def packed_forwards(model: PreTrainedModel, pack_weights: bool | str) -> dict[nn.Module, PackedLinear | PackedExperts]:
    """Packs weights of a model that are new or have changed, and returns the packed modules' `forward` for a view."""
    if model in _owned:
        found = {module: _packed[module].forward for module in model.modules() if module in _packed}
        if any(forward.is_alone for forward in found.values()):
            return found
    has_hooks = torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks
    if not pack_weights or has_hooks or model.device.type != "cpu" or is_compiled(model) or not _can_pack():
        return {}
    is_auto = pack_weights == "auto"
    kinds = {module: kind for module in model.modules() for kind in KINDS if is_eligible(module, kind.weights(module))}
    weights = {module: kind.weights(module) for module, kind in kinds.items()}
    if is_auto:
        kinds = {module: kind for module, kind in kinds.items() if any(map(is_large, weights[module]))}
    with _lock:
        values = {module: values_of(of_module) for module, of_module in weights.items() if module in kinds}
        stale = [module for module in kinds if module not in _packed or _packed[module].values != values[module]]
        for module in stale:
            _packed.pop(module, None)  # a changed weight's memory is free for the new copy
        verdicts = {module: found for module in stale if (found := _verdicts(kinds[module].tried(module), is_auto))}
        if verdicts and is_auto and not _has_room(model, [one for module in verdicts for one in weights[module]]):
            verdicts = {}
        for module, found in verdicts.items():
            _packed[module] = Packed(kinds[module](module, found), values[module])
        forwards = {module: _packed[module].forward for module in kinds if module in _packed}
        if verdicts and model in _owned:
            _keep_packed_alone(model, forwards, weights)
    return forwards


def forward_of(layer: nn.Linear) -> Callable:
    """Returns what computes a linear layer in a call: it or its packed weight, as a trial shows, if memory suffices."""
    is_tried = _can_pack() and is_eligible(layer, PackedLinear.weights(layer)) and is_large(layer.weight)
    verdicts = is_tried and _verdicts(PackedLinear.tried(layer), is_auto=True)
    return PackedLinear(layer, verdicts) if verdicts else layer


def own(model: PreTrainedModel) -> None:
    """Says that nobody reads a model's weights, as in a worker that loaded it, so that it keeps no second copy."""
    _owned.add(model)


def forget(model: PreTrainedModel) -> None:
    """Frees the packed weights of a model that has its own as well."""
    with _lock:
        for module in model.modules() if model not in _owned else ():
            _packed.pop(module, None)


@torch.no_grad()
def _keep_packed_alone(
    model: PreTrainedModel,
    forwards: dict[nn.Module, PackedLinear | PackedExperts],
    weights: dict[nn.Module, list[nn.Parameter]],
) -> None:
    """
    Gives up the packed weights that no other module uses and that a pass over a text computes with; all passes are
    packed then. A second pass shows whether the model reads a weight by itself: it would read NaN, and keeps all.
    """
    users = Counter(id(one) for module in model.modules() for one in module._parameters.values())
    tokens = torch.arange(FOR_TOKENS, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    called = set()
    noticed = {one: lambda *inputs, one=one: called.add(one) or forwards[one](*inputs) for one in forwards}
    view, _ = view_of(model, forwards=noticed)
    expected = view(input_ids=tokens, use_cache=False).logits
    own = {module: weights[module] for module in called if all(users[id(one)] == 1 for one in weights[module])}
    kept = [(module, weight, weight.data) for module in own for weight in own[module]]
    view, _ = view_of(model, forwards=forwards)
    is_sound = False
    try:
        for module, weight, _ in kept:
            forwards[module].is_alone = True
            weight.data = torch.full((), torch.nan, dtype=weight.dtype).expand(weight.shape)
        found = view(input_ids=tokens, use_cache=False).logits
        is_sound = not found.isnan().any() and are_close(found, expected)
    finally:  # also after Ctrl-C in a chat
        for module, weight, values in kept:
            if is_sound:
                module.forward = forwards[module]
            else:
                weight.data, forwards[module].is_alone = values, False


def is_eligible(module: nn.Module, weights: list[torch.Tensor | None]) -> bool:
    """Whether a module's result is that of its class with these weights, and of nothing else."""
    return (
        bool(weights)
        and all(map(is_plain, weights))
        and not (module._forward_hooks or module._forward_pre_hooks)
        and "forward" not in vars(module)
        and module._compiled_call_impl is None
    )


def is_plain(weight: torch.Tensor | None) -> bool:
    return (
        type(weight) is nn.Parameter
        and weight.dtype in DTYPES
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and not weight.is_inference()  # such a tensor does not count its changes
    )


def is_large(weight: torch.Tensor) -> bool:
    return weight.shape[-2:].numel() >= LEAST


def _can_pack() -> bool:
    """Whether torch has the operations, and computes float32 products in float32."""
    names = "_reorder_linear_weight", "_linear_pointwise"
    is_here = torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)
    # With a lower precision, torch's own product counts, as the user has set it.
    return is_here and devices.multiplies_in_float32(torch.device("cpu"))


def _verdicts(tried: list[tuple[Sequence[torch.Tensor], torch.Tensor | None]], is_auto: bool) -> list[Verdict]:
    """Returns when to use each packed weight, none if torch cannot pack it, or if `"auto"` finds no gain."""
    verdicts = [verdict_on(weights, bias) for weights, bias in tried]
    if None in verdicts or is_auto and not any(any(verdict.is_faster) for verdict in verdicts):
        return []
    return verdicts if is_auto else [Verdict((True,) * len(TRIED), verdict.fewest) for verdict in verdicts]


def _has_room(model: PreTrainedModel, weights: list[nn.Parameter]) -> bool:
    """Whether free memory holds the packed weights twice. If it does not, this is said once."""
    needed, free = sum(weight.nbytes for weight in weights), devices.free_memory(model.device)
    if free is None or free >= (1 if model in _owned else 2) * needed:
        return True
    logger.warning_once(
        f"{type(model).__name__} runs with weights that are not packed, which is slower: {needed / GIGABYTE:.1f} GB "
        f"would be packed, and {free / GIGABYTE:.1f} GB of memory are free. Free twice as much, load the model in "
        "bfloat16, or set SSDConfig(pack_weights=True) to pack anyway, or False for silence."
    )
    return False
