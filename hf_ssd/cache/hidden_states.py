"""Captures hidden states, keys and values of chosen layers in a model's own forward passes."""

import sys
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel


class HiddenStates:
    """Keeps hidden states of each pass of a view until they are taken: transformers' options differ by version."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[int],  # as in transformers: 0 is the embedding, the number of layers the last normalization
        keys: Sequence[int] = (),  # layers, counted from 0, whose keys and values of the new tokens are kept too
    ):
        self.captured: list[dict] = []  # for each pass, the hidden states of the layers
        self.layers = (*layers, *((kind, layer) for layer in keys for kind in ("key", "value")))
        modules = iter(hooked_modules(model, layers, keys))
        for layer, module in dict(zip(layers, modules)).items():
            self._keep(layer, module, _output_of if layer else _input_of)
        for layer, attention, k_norm, v_norm in zip(keys, modules, modules, modules):
            attention.register_forward_pre_hook(self._keep_rotation, with_kwargs=True)
            rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
            self._keep(("key", layer), k_norm, lambda *of, rotate=rotate: rotate(of[-1], *self.rotation, 2))
            self._keep(("value", layer), v_norm, _output_of)

    def _keep(self, layer: int | tuple[str, int], module: nn.Module, states_of: Callable) -> None:
        def keep(module, arguments, named, output) -> None:
            if not self.captured or layer in self.captured[-1]:
                self.captured.append({})
            self.captured[-1][layer] = states_of(arguments, named, output).flatten(2)

        module.register_forward_hook(keep, with_kwargs=True)

    def _keep_rotation(self, module, arguments, named) -> None:
        self.rotation = named["position_embeddings"]

    def take(self) -> torch.Tensor:
        """Returns the states of all passes since the last call, `(rows, tokens, width)`, layers side by side."""
        captured, self.captured = self.captured, []
        device, passes = captured[0][self.layers[0]].device, []
        for of_pass in captured:
            states = [of_pass[layer].to(device) for layer in self.layers]
            longest = max(one.shape[1] for one in states)
            # A prefill may leave out all tokens but the last in layers that share keys: these have zeros.
            passes.append(torch.cat([pad(one, (0, 0, longest - one.shape[1], 0)) for one in states], dim=-1))
        return passes[0] if len(passes) == 1 else torch.cat(passes, dim=1)


def _input_of(arguments: tuple, named: dict, output) -> torch.Tensor:
    return arguments[0] if arguments else named["hidden_states"]


def _output_of(arguments: tuple, named: dict, output) -> torch.Tensor:
    return output[0] if isinstance(output, (tuple, list)) else output


def hooked_modules(model: PreTrainedModel, layers: Sequence[int], keys: Sequence[int] = ()) -> list[nn.Module]:
    """Returns the modules that get hooks of [`HiddenStates`]: one for each layer, and three for each of `keys`."""
    check_layers(model, layers)
    blocks, norm = decoder_parts(model)
    found = [norm if layer == len(blocks) else blocks[max(0, layer - 1)] for layer in layers]
    attention = [blocks[layer].self_attn for layer in keys]
    return found + [part for one in attention for part in (one, one.k_norm, one.v_norm)]


def decoder_parts(model: PreTrainedModel) -> tuple[nn.ModuleList, nn.Module | None]:
    """Returns the layers of a decoder and the normalization after them, if any, or raises `ValueError`."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    lists = (getattr(decoder, name, None) for name in ("layers", "h", "blocks"))
    blocks = next((one for one in lists if isinstance(one, nn.ModuleList)), None)
    if blocks is None:
        raise ValueError(
            f"{type(model).__name__} has no list of layers whose hidden states a draft could read; use a draft that "
            "reads tokens alone."
        )
    norms = (getattr(decoder, name, None) for name in ("norm", "final_layernorm", "ln_f", "norm_f"))
    return blocks, next((norm for norm in norms if norm is not None), None)


def check_layers(model: PreTrainedModel, layers: Sequence[int]) -> None:
    blocks, norm = decoder_parts(model)
    last = len(blocks) - (norm is None)
    if not all(isinstance(layer, int) and 0 <= layer <= last for layer in layers):
        raise ValueError(
            f"The draft reads the hidden states {list(layers)}, and {type(model).__name__} has those of 0 to {last}; "
            "the draft was made for another target."
        )


def layers_that_share_keys(model: PreTrainedModel) -> dict[str, int]:
    """Returns the last layer of a Gemma 4, of each kind of attention, whose keys and values later layers share."""
    blocks, shared = decoder_parts(model)[0], {}
    for index, block in enumerate(blocks):
        attention = getattr(block, "self_attn", None)
        if hasattr(attention, "k_norm") and not getattr(attention, "is_kv_shared_layer", True):
            shared[attention.layer_type] = index
    if not shared:
        raise ValueError(
            f"A Gemma 4 assistant reads keys and values of Gemma 4 models, and {type(model).__name__} is none; use the "
            "target that the assistant was published with."
        )
    return shared
