"""Weights of experts that are packed once, for passes over a few tokens on a CPU, expert by expert."""

import weakref
from collections.abc import Sequence

import torch
from torch import nn
from transformers.integrations import moe

from .packed_linear import PackedWeight, Verdict, computes

IMPLEMENTATIONS = (None, "eager", "batched_mm", "grouped_mm")  # of transformers, which compute the same on a CPU


class PackedExperts:
    """The `forward` of the experts of a layer, for all classes that have transformers' `forward` for experts."""

    def __init__(self, experts: nn.Module, verdicts: list[Verdict]):
        self.experts = weakref.ref(experts)
        self.packed = [
            [PackedWeight(weight, verdict) for weight, _ in _products(experts, name)]
            for name, verdict in zip(_names(experts), verdicts)
        ]
        self.is_alone = False  # whether the experts' own weights were given up

    @staticmethod
    def weights(module: nn.Module) -> list[torch.Tensor | None]:
        """Returns the weights that are packed, none if the module is of another kind."""
        is_theirs = getattr(type(module).forward, "__globals__", None) is vars(moe)
        if not is_theirs or module.config._experts_implementation not in IMPLEMENTATIONS:
            return []
        return [module._parameters.get(name) for name in _names(module)]

    @staticmethod
    def tried(experts: nn.Module) -> list[tuple[Sequence[torch.Tensor], torch.Tensor | None]]:
        """Returns weights and a bias for each product to try. Few experts would stay in the processor's cache."""
        products = [list(zip(*_products(experts, name))) for name in _names(experts)]
        return [(weights, biases[0]) for weights, biases in products]

    def __call__(
        self,
        hidden_states: torch.Tensor,  # (tokens, width)
        top_k_index: torch.LongTensor,  # (tokens, top_k), the experts of each token; higher numbers mean none
        top_k_weights: torch.Tensor,  # (tokens, top_k), the weights of their results
    ) -> torch.Tensor:
        experts = self.experts()
        if not (self.is_alone or computes(hidden_states, experts.down_proj)):
            return type(experts).forward(experts, hidden_states, top_k_index, top_k_weights)
        up, down = (_products(experts, name) for name in _names(experts))
        # 1. Sort the pairs of a token and an expert by experts.
        order = top_k_index.flatten().argsort(stable=True)
        counts = top_k_index.flatten().bincount(minlength=len(up)).tolist()
        states = hidden_states[order // top_k_index.shape[1]].split(counts)
        # 2. Compute the experts that were chosen.
        results = []
        for number in range(len(up)):
            if counts[number]:
                inner = self.packed[0][number].product(states[number], *up[number], self.is_alone)
                inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
                results.append(self.packed[1][number].product(inner, *down[number], self.is_alone))
        results.append(hidden_states.new_zeros(sum(counts[len(up) :]), len(down[0][0])))
        # 3. Add the results of each token.
        result = torch.cat(results)[order.argsort()].unflatten(0, top_k_index.shape)
        if getattr(experts, "has_post_expert_norm", False):  # since transformers 5.18
            result = experts.post_expert_norm(result)
        return (result * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)


def _names(experts: nn.Module) -> tuple[str, str]:
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def _products(experts: nn.Module, name: str) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Returns the weight and the bias of each expert."""
    weights, biases = experts._parameters[name], experts._parameters.get(f"{name}_bias")
    weights = (weights.mT if experts.is_transposed else weights).unbind()
    return list(zip(weights, [None] * len(weights) if biases is None else biases.unbind()))
