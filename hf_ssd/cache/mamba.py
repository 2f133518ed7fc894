"""Passes in which Mamba-2 layers compute several tokens as they compute a single token."""

import functools
import math
from types import MethodType

from torch import nn

from .model_runner import Runner

SHORTEST_CHUNK = 16  # tokens; the chunks of Mamba-2's kernels are powers of 2


class RecurrentRunner(Runner):
    """
    Runs passes eagerly. transformers bounds the step sizes of Mamba-2 only where several tokens are computed; these
    passes have no bounds. The chunks to which transformers pads the tokens are short; chunks only group the arithmetic.

    A thread that uses the model at the same time meets none of these changes: they are made in a view of the model,
    which belongs to this runner.

    Args:
        model, cache: See [`Runner`].
    """

    def __init__(self, model, cache):
        views: dict[nn.Module, nn.Module] = {}
        super().__init__(_view(model, views), cache)
        self.chunk_sizes = {layer: layer.chunk_size for layer in views.values() if _is_mamba(layer)}
        for layer in self.chunk_sizes:
            layer.time_step_limit = (0.0, math.inf)

    def run(self, inputs, logits_to_keep=None):
        tokens = inputs["input_ids"].shape[1]
        for layer, size in self.chunk_sizes.items():
            layer.chunk_size = min(size, max(SHORTEST_CHUNK, 1 << (tokens - 1).bit_length()))
        return super().run(inputs, logits_to_keep)


def _is_mamba(module: nn.Module) -> bool:
    return hasattr(module, "time_step_limit") and hasattr(module, "chunk_size")


def _view(module: nn.Module, views: dict[nn.Module, nn.Module]) -> nn.Module:
    """
    Returns a module with the same weights, hooks and children, except that the Mamba-2 layers in it, and the modules
    that contain them, are copies. A module without Mamba-2 layers is returned as it is. `views` collects the copies.
    """
    if module in views:  # some models use a layer in several places
        return views[module]
    children = {name: child and _view(child, views) for name, child in module._modules.items()}
    if not _is_mamba(module) and all(children[name] is child for name, child in module._modules.items()):
        return module
    view = views[module] = object.__new__(type(module))
    attributes = {name: _rebound(value, module, view) for name, value in vars(module).items()}
    view.__dict__.update(attributes, _modules=children, _compiled_call_impl=None)
    return view


def _rebound(value, module: nn.Module, view: nn.Module):
    """Returns an attribute as the view has it: accelerate and torch.compile store functions that hold the module."""
    value = getattr(value, "_torchdynamo_orig_callable", value)
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, view)
    if isinstance(value, functools.partial) and any(one is module for one in value.args):
        return functools.partial(value.func, *[view if one is module else one for one in value.args], **value.keywords)
    return value
