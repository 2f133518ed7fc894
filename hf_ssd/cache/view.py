"""Views of a model: its weights in modules of our own, which have what our passes do differently."""

import copy
import gc
import operator
from collections.abc import Callable, Collection, Mapping
from functools import partial, update_wrapper
from types import CellType, FunctionType, MethodType

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

OF_TORCH = frozenset(vars(nn.Module()))  # attributes that every module has
PLAIN = frozenset((int, float, bool, str, type(None)))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


def view_of(
    model: PreTrainedModel,
    hooked: Collection[nn.Module] = (),  # modules whose copies have hooks of their own beside the model's
    forwards: Mapping[nn.Module, Callable] = {},  # of the copies of some modules
) -> tuple[PreTrainedModel, list[PreTrainedConfig]]:
    """Returns a view of a model, and its configs. It is not compiled, and sees later changes but those of modules."""
    needed: dict[nn.Module, bool] = {}
    configs: dict[int, PreTrainedConfig] = {}

    def is_needed(module: nn.Module) -> bool:
        if module in needed:  # some models use a layer in several places
            return needed[module]
        attributes = vars(module)
        own = [one for one in map(attributes.get, attributes.keys() - OF_TORCH) if isinstance(one, PreTrainedConfig)]
        # A rotary embedding changes its buffers and attributes together, so it is not copied.
        is_own = module is model or module in hooked or module in forwards or is_mamba(module)
        needed[module] = is_own
        if is_own or module._compiled_call_impl is None:  # a part that is compiled by itself stays compiled
            for config in own:
                _add(config, configs)
            inner = [is_needed(child) for child in module._modules.values() if child is not None]
            needed[module] |= any(inner) or bool(own and (module._modules or not module._buffers))
        return needed[module]

    is_needed(model)
    modules = [module for module, is_copied in needed.items() if is_copied]
    of_view = [copy.copy(config) for config in configs.values()]
    copies: dict[int, object] = dict(zip(configs, of_view))
    copies |= {id(module): object.__new__(type(module)) for module in modules}
    for one in (*configs.values(), *modules):
        attributes, view = vars(one), vars(copies[id(one)])
        view.update(attributes)
        for name in attributes.keys() - OF_TORCH:
            value = attributes[name]
            if type(value) not in PLAIN:
                view[name] = _seen(value, copies)
    for module in modules:
        view = vars(copies[id(module)])
        view["_modules"] = {name: copies.get(id(child), child) for name, child in module._modules.items()}
        view["_compiled_call_impl"] = None
        if module in hooked:
            view.update({name: view[name].copy() for name in HOOKS})
        if module in forwards:
            view["forward"] = forwards[module]
    return copies[id(model)], of_view


def is_mamba(module: nn.Module) -> bool:
    """Whether a module is a Mamba-2 layer, whose settings passes of recurrent models change in their view."""
    return "time_step_limit" in vars(module) and "chunk_size" in vars(module)


def _add(config: PreTrainedConfig, configs: dict[int, PreTrainedConfig]) -> None:
    """Adds a config, and the configs within it."""
    if id(config) not in configs:
        configs[id(config)] = config
        for one in vars(config).values():
            if isinstance(one, PreTrainedConfig):
                _add(one, configs)


def _seen(value, copies: dict[int, object], within: tuple = ()):
    """Returns a value with copies in the place of modules and configs, also in lists and around a `forward`."""
    if id(value) in copies:
        return copies[id(value)]
    kind = type(value)
    if isinstance(value, nn.Module) or any(value is one for one in within):
        return value
    if kind in (list, tuple):
        parts, build = value, kind
    elif kind is dict:
        parts, build = list(value.values()), lambda parts: dict(zip(value, parts))
    elif callable(value) and getattr(value, "_torchdynamo_orig_callable", None) is not None:
        parts, build = (value._torchdynamo_orig_callable,), lambda parts: parts[0]
    elif kind is MethodType:
        parts, build = (value.__func__, value.__self__), lambda parts: MethodType(*parts)
    elif kind is partial:
        parts, build = (value.func, *value.args), lambda parts: update_wrapper(partial(*parts, **value.keywords), value)
    elif kind is FunctionType and value.__closure__:
        parts, build = value.__closure__, lambda parts: _with_closure(value, parts)
    elif kind is CellType:
        parts, build = gc.get_referents(value), lambda parts: CellType(*parts)  # none in a variable without a value
    else:
        return value
    seen = [_seen(part, copies, (*within, value)) for part in parts]
    return value if all(map(operator.is_, seen, parts)) else build(seen)


def _with_closure(function: FunctionType, cells: list[CellType]) -> FunctionType:
    closure = tuple(cells)
    other = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
    other.__kwdefaults__, other.__dict__ = function.__kwdefaults__, function.__dict__
    return other
