"""
Weights of linear layers that are packed once, by oneDNN's own operations. torch packs a weight anew in each product
with more than one token, which takes longer than the product.
"""

import timeit
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear, pad

from .support import are_close

TRIED = (1, 5, 16)  # tokens of the products that are timed
FOR_TOKENS = 8  # for which oneDNN chooses the order; it serves any number
FASTER = 0.95  # of the time of torch's own product, which a packed product must not exceed
MOST = 2**24  # values of a weight that are tried, which takes 0.1 s: of a large head these are its first rows

_verdicts: "dict[tuple, Verdict | None]" = {}  # by kind of weight; `None` if torch cannot pack it


class Verdict(NamedTuple):
    """The result of a trial of a packed weight."""

    is_faster: tuple[bool, ...]  # than torch's own product, for as many tokens as in `TRIED`
    # Tokens of a product. Fewer are padded, where a product with one token takes longer than with five.
    fewest: int


class PackedWeight:
    def __init__(self, weight: torch.Tensor, verdict: Verdict):
        self.packed = _pack(weight.detach())
        self.is_faster, self.fewest = verdict

    def product(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_alone: bool
    ) -> torch.Tensor:
        """Returns the product with the packed weight, or that of torch if it is as fast and the weight is there."""
        tokens = input.numel() // weight.shape[1]
        is_faster = self.is_faster[0 if tokens <= 1 else 1 if tokens < TRIED[2] else 2]
        if not is_alone and (not is_faster or not tokens):
            return linear(input, weight, bias)
        if not 0 < tokens < self.fewest:
            return _product(input, self.packed, bias)
        rows = pad(input.reshape(tokens, -1), (0, 0, 0, self.fewest - tokens))
        return _product(rows, self.packed, bias)[:tokens].view(*input.shape[:-1], -1)


class PackedLinear:
    """The `forward` of a linear layer whose weight is packed."""

    def __init__(self, layer: nn.Linear, verdicts: list[Verdict]):
        # torch's own dictionary of parameters follows the layer, and does not keep it alive.
        self.parameters, self.packed = layer._parameters, PackedWeight(layer.weight, *verdicts)
        self.is_alone = False  # whether the layer's own weight was given up

    @staticmethod
    def weights(module: nn.Module) -> list[torch.Tensor | None]:
        """Returns the weights that are packed, none if the module is of another kind."""
        return [module._parameters.get("weight")] if type(module) is nn.Linear else []

    @staticmethod
    def tried(layer: nn.Linear) -> list[tuple[Sequence[torch.Tensor], torch.Tensor | None]]:
        """Returns weights and a bias for each product to try."""
        return [([layer.weight], layer.bias)]

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.parameters["weight"], self.parameters["bias"]
        if self.is_alone or computes(input, weight):
            return self.packed.product(input, weight, bias, self.is_alone)
        return linear(input, weight, bias)


def computes(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a packed weight computes a product as the weight itself: it knows no gradients and no autocast."""
    return input.dtype == weight.dtype and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))


def verdict_on(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Verdict | None:
    """Returns when packed weights of one kind are faster, or `None` if torch cannot pack them."""
    first = weights[0]
    kind = first.shape, first.stride(), first.dtype, len(weights), bias is not None, torch.get_num_threads()
    if kind not in _verdicts:
        _verdicts[kind] = _try(weights, bias)
    return _verdicts[kind]


@torch.no_grad()
def _try(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Verdict | None:
    rows, count = max(1, MOST // weights[0].shape[1]), max(1, MOST // weights[0].numel())
    theirs = []
    ours = []
    weights = [weight[:rows] for weight in weights[:count]]
    bias = None if bias is None else bias[:rows]
    try:
        packed = [_pack(weight.detach()) for weight in weights]
        for tokens in TRIED:
            states = torch.ones(tokens, weights[0].shape[1], dtype=weights[0].dtype)
            seconds, expected = _timed(linear, states, weights, bias)
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


def _timed(
    call: Callable, states: torch.Tensor, weights: list[torch.Tensor], bias: torch.Tensor | None
) -> tuple[float, torch.Tensor]:
    """Returns the shortest of three times for all weights, after a call that is not timed, and the first's result."""
    result = call(states, weights[0], bias)
    return min(timeit.repeat(lambda: [call(states, weight, bias) for weight in weights], number=1, repeat=3)), result
