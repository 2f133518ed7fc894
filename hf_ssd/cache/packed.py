"""
Weights of linear layers that are packed once, for passes over a few tokens on a CPU.

torch packs a weight anew in each product with more than one token, which takes longer than the product. Here oneDNN's
own operations, which torch.compile uses too, pack it once. A view of the model computes with the packed weights; the
model keeps its layers as they are.
"""

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear, pad
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedModel
from transformers.utils import logging

from .. import devices
from .compiled import is_compiled
from .support import are_close
from .view import view_of

DTYPES = (torch.float32, torch.bfloat16)
TRIED = (1, 5, 16)  # tokens of the passes that are timed
FOR_TOKENS = 8  # for which oneDNN chooses the order; it serves any number
FASTER = 0.95  # of the time of torch's own product, which a packed one must not exceed
MOST = 2**24  # values of a weight that are tried, which takes 0.1 s: of a large head these are its first rows
LEAST = 2**17  # values of a weight: smaller ones stay in the processor's cache and gain nothing
SAMPLES = 32  # values that are compared: writing to `weight.data` changes neither address nor version
GIGABYTE = 2**30

logger = logging.get_logger(__name__)
_packed: "weakref.WeakKeyDictionary[nn.Linear, PackedWeight]" = weakref.WeakKeyDictionary()
_owned: "weakref.WeakSet[PreTrainedModel]" = weakref.WeakSet()
_lock = threading.Lock()  # so that threads do not pack a model twice
_verdicts: "dict[tuple, Verdict | None]" = {}  # by kind of layer; `None` if torch cannot pack it


class Verdict(NamedTuple):
    """The result of a trial of a packed weight."""

    is_faster: tuple[bool, ...]  # than torch's own product, for as many tokens as in `TRIED`
    # Tokens of a product. Fewer are padded, where a product with one token takes longer than with five.
    fewest: int


class PackedWeight:
    """The `forward` of a linear layer whose weight is packed."""

    def __init__(self, layer: nn.Linear, packed: torch.Tensor, verdict: Verdict):
        # torch's own dictionary of parameters follows the layer, and does not keep it alive.
        self.parameters, self.packed = layer._parameters, packed
        self.is_faster, self.fewest = verdict
        self.state, self.sample = _state(layer.weight), _sample(layer.weight)
        self.values = self.sample.clone()
        self.is_alone = False  # whether the layer's own weight was given up

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.parameters["weight"], self.parameters["bias"]
        tokens = input.numel() // weight.shape[1]
        is_faster = self.is_faster[0 if tokens <= 1 else 1 if tokens < TRIED[2] else 2]
        is_other = input.dtype != weight.dtype or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
        if not self.is_alone and (is_other or not is_faster or not tokens):
            return linear(input, weight, bias)
        if not 0 < tokens < self.fewest:
            return _product(input, self.packed, bias)
        rows = pad(input.reshape(tokens, -1), (0, 0, 0, self.fewest - tokens))
        return _product(rows, self.packed, bias)[:tokens].view(*input.shape[:-1], -1)


def packed_forwards(model: PreTrainedModel, pack_weights: bool | str) -> dict[nn.Module, PackedWeight]:
    """Packs weights of a model that are new or have changed, and returns the packed layers' `forward` for a view."""
    if model in _owned:
        found = {module: _packed[module] for module in model.modules() if module in _packed}
        if any(forward.is_alone for forward in found.values()):
            return found
    has_hooks = torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks
    if not pack_weights or has_hooks or model.device.type != "cpu" or is_compiled(model) or not _can_pack():
        return {}
    is_auto = pack_weights == "auto"
    layers = [one for one in model.modules() if type(one) is nn.Linear and is_eligible(one)]
    layers = [layer for layer in layers if not is_auto or layer.weight.numel() >= LEAST]
    with _lock:
        stale = _stale({layer: _packed.get(layer) for layer in layers})
        for layer in stale:
            _packed.pop(layer, None)  # a changed weight's memory is free for the new one
        verdicts = {layer: verdict for layer in stale if (verdict := _verdict(layer, is_auto))}
        if verdicts and is_auto and not _has_room(model, list(verdicts)):
            verdicts = {}
        for layer, verdict in verdicts.items():
            _packed[layer] = PackedWeight(layer, _pack(layer.weight.detach()), verdict)
        found = {layer: _packed[layer] for layer in layers if layer in _packed}
        if verdicts and model in _owned:
            _keep_packed_alone(model, found)
    return found


def _stale(found: "dict[nn.Linear, PackedWeight | None]") -> list[nn.Linear]:
    """Returns the layers whose weight is not packed, or has changed since."""
    stale = [layer for layer, packed in found.items() if packed is None or packed.state != _state(layer.weight)]
    gone = set(stale)
    rest = {layer: packed for layer, packed in found.items() if layer not in gone}
    samples, values = ([getattr(one, name) for one in rest.values()] for name in ("sample", "values"))
    if rest and not torch.equal(torch.cat(samples), torch.cat(values)):
        stale += [layer for layer, packed in rest.items() if not torch.equal(packed.sample, packed.values)]
    return stale


def own(model: PreTrainedModel) -> None:
    """Says that nobody reads a model's weights, as in a worker that loaded it, so that it keeps no second copy."""
    _owned.add(model)


@torch.no_grad()
def _keep_packed_alone(model: PreTrainedModel, forwards: dict[nn.Linear, PackedWeight]) -> None:
    """
    Gives up the weights that are packed, except those that other modules use, such as an embedding, and those that a
    pass over a text leaves out, such as a vision tower's. Passes that are not ours compute packed, too. A second pass
    shows whether the model reads a weight by itself: it would read NaN. Then the model keeps its weights.
    """
    users = Counter(id(one) for module in model.modules() for one in module._parameters.values())
    tokens = torch.arange(FOR_TOKENS, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    called = set()

    def noticed(layer: nn.Linear) -> Callable:
        return lambda input: called.add(layer) or forwards[layer](input)

    view, _ = view_of(model, forwards={layer: noticed(layer) for layer in forwards})
    expected = view(input_ids=tokens, use_cache=False).logits
    layers = {layer: forward for layer, forward in forwards.items() if users[id(layer.weight)] == 1 and layer in called}
    kept = [layer.weight.data for layer in layers]
    view, _ = view_of(model, forwards=forwards)
    is_sound = False
    try:
        for layer, forward in layers.items():
            forward.is_alone = True
            layer.weight.data = torch.full((), torch.nan, dtype=layer.weight.dtype).expand(layer.weight.shape)
        found = view(input_ids=tokens, use_cache=False).logits
        is_sound = not found.isnan().any() and are_close(found, expected)
    finally:  # also after Ctrl-C in a chat
        for (layer, forward), weight in zip(layers.items(), kept):
            if is_sound:
                forward.sample = None
                layer.forward = forward
            else:
                layer.weight.data, forward.is_alone = weight, False


def is_eligible(layer: nn.Linear) -> bool:
    """Whether a layer's result is the product with its weight and nothing else."""
    weight = layer._parameters.get("weight")
    return (
        type(weight) is nn.Parameter
        and weight.dtype in DTYPES
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and not weight.is_inference()  # such a tensor does not count its changes
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and "forward" not in vars(layer)
        and layer._compiled_call_impl is None
    )


def _can_pack() -> bool:
    """Whether torch has the operations, and computes float32 products in float32."""
    names = "_reorder_linear_weight", "_linear_pointwise"
    is_here = torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)
    # With a lower precision, torch's own product counts, as the user has set it.
    return is_here and devices.multiplies_in_float32(torch.device("cpu"))


def _verdict(layer: nn.Linear, is_auto: bool) -> Verdict | None:
    """Returns when to use a packed weight, or `None` if torch cannot pack it, or if `"auto"` finds no gain."""
    kind = layer.weight.shape, layer.weight.dtype, layer.bias is not None, torch.get_num_threads()
    if kind not in _verdicts:
        _verdicts[kind] = _try(layer)
    verdict = _verdicts[kind]
    if verdict is None or is_auto:
        return verdict if verdict and any(verdict.is_faster) else None
    return Verdict((True,) * len(TRIED), verdict.fewest)


@torch.no_grad()
def _try(layer: nn.Linear) -> Verdict | None:
    rows = max(1, MOST // layer.weight.shape[1])
    theirs = []
    ours = []
    weight = layer.weight[:rows]
    bias = None if layer.bias is None else layer.bias[:rows]
    try:
        packed = _pack(weight.detach())
        for tokens in TRIED:
            states = torch.ones(tokens, weight.shape[1], dtype=weight.dtype)
            seconds, expected = _timed(linear, states, weight, bias)
            theirs.append(seconds)
            seconds, result = _timed(_product, states, packed, bias)
            ours.append(seconds)
            if not are_close(result, expected):
                return None
    except RuntimeError:  # of a processor that lacks instructions
        return None
    fewest = 1
    if ours[1] < FASTER * ours[0]:
        fewest, ours[0] = TRIED[1], ours[1]
    return Verdict(tuple(mine <= FASTER * torchs for mine, torchs in zip(ours, theirs)), fewest)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, FOR_TOKENS)


def _product(states: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(states, packed, bias, "none", [], "")


def _timed(call: Callable, *arguments) -> tuple[float, torch.Tensor]:
    """Returns the shortest of three times, after a call that is not timed, and the result."""
    result, times = call(*arguments), []
    for _ in range(3):
        start = time.perf_counter()
        call(*arguments)
        times.append(time.perf_counter() - start)
    return min(times), result


def _has_room(model: PreTrainedModel, layers: list[nn.Linear]) -> bool:
    """Whether free memory holds the packed weights twice. If it does not, this is said once."""
    needed, free = sum(layer.weight.nbytes for layer in layers), devices.free_memory(model.device)
    if free is None or free >= (1 if model in _owned else 2) * needed:
        return True
    logger.warning_once(
        f"{type(model).__name__} runs with weights that are not packed, which is slower: {needed / GIGABYTE:.1f} GB "
        f"would be packed, and {free / GIGABYTE:.1f} GB of memory are free. Free twice as much, load the model in "
        "bfloat16, or set SSDConfig(pack_weights=True) to pack anyway, or False for silence."
    )
    return False


def _state(weight: torch.Tensor) -> tuple:
    return id(weight), weight.data_ptr(), weight._version


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Returns values from rows and columns all over a weight, without a copy."""
    values = weight.detach().view(-1)
    return values[:: max(1, values.numel() // SAMPLES) | 1]
