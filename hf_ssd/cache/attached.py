"""Hooks, forwards and adapters that were attached to a model's modules, and on which its forward passes depend."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

SAMPLES = 32  # values of each tensor that are compared; of experts, whose weights have three axes, two each at least
GLOBAL_HOOKS = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks  # of all modules
READ_ONLY = ("transformers.", "hf_ssd.")  # packages whose hooks capture outputs and change nothing
LIBRARIES = ("torch", "transformers", "hf_ssd", "accelerate")  # packages whose modules compute tokens independently


@dataclass
class Attached:
    """Everything that was attached to a model. Two of them are equal if nothing was attached or removed in between."""

    kinds: dict[type, weakref.ref] = field(default_factory=dict)  # classes of the modules, with their `forward`
    hooks: list[int] = field(default_factory=list)  # ids, global ones too; torch never gives an id to a second hook
    forwards: list[weakref.ref] = field(default_factory=list)  # in the place of a module's `forward`
    adapters: set[tuple] = field(default_factory=set)  # active names, whether disabled, merged names
    has_own_forward: bool = False  # that does not compute the same as the module's class

    @property
    def may_depend_on_rows(self) -> bool:
        """Whether hooks or forwards, of which only their author knows what they do, may depend on a pass's rows."""
        return bool(self.hooks) or self.has_own_forward

    @property
    def may_depend_on_tokens(self) -> bool:
        """Whether a part of the model that is not of torch or transformers may depend on a pass's number of tokens."""
        return self.may_depend_on_rows or any(
            str(getattr(one, "__module__", "")).partition(".")[0] not in LIBRARIES
            for kind, forward in self.kinds.items()
            for one in (kind, forward())
        )


def attached_to(model: PreTrainedModel) -> Attached:
    found = Attached(hooks=[key for hooks in GLOBAL_HOOKS for key in hooks])
    waiting, seen = [model], set()
    while waiting:  # model.modules() also makes names, which takes longer
        module = waiting.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        own = module.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:
            found.hooks += [key for key, _ in hooks_of(module)]
        if "forward" in own:
            found.forwards.append(weakref.ref(own["forward"]))
            found.has_own_forward |= forward_of(module) is not None
        if "_active_adapter" in own or "_disable_adapters" in own:
            active = module._active_adapter
            active = (active,) if isinstance(active, str) else tuple(active or ())
            found.adapters.add((active, module._disable_adapters, tuple(getattr(module, "merged_adapters", ()))))
        waiting += own["_modules"].values()
    found.kinds = {kind: weakref.ref(kind.forward) for kind in map(type, seen)}
    return found


def values_of(tensors: Iterable[torch.Tensor]) -> tuple:
    """Returns marks that change when the tensors' values change: addresses, versions, and values all over each."""
    marks, some = [], {}
    for tensor in tensors:
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta  # others may have no storage
        version = None if tensor.is_inference() else tensor._version
        marks.append((tensor.data_ptr() if is_plain else id(tensor), version))
        if is_plain and tensor.is_contiguous() and tensor.numel():
            # Changes through `.data` or numpy leave addresses and versions as they are.
            count = max(SAMPLES, 2 * len(tensor)) if tensor.dim() == 3 else SAMPLES
            few = tensor.detach().view(-1)[:: max(1, tensor.numel() // count) | 1]
            some.setdefault((tensor.device, tensor.dtype), []).append(few)
    return marks, [torch.cat(of_kind).view(torch.uint8).cpu().numpy().tobytes() for of_kind in some.values()]


def hooks_of(module: nn.Module) -> Iterator[tuple[int, Callable]]:
    """Yields a module's forward hooks, except those that transformers and this package leave to capture outputs."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            if not str(getattr(hook, "__module__", "")).startswith(READ_ONLY):
                yield key, hook


def forward_of(module: nn.Module) -> Callable | None:
    """Returns the function in place of a module's `forward`, but `None` if that computes the same."""
    own = vars(module)
    for name in ("forward", "_old_forward", "_original_forward"):  # accelerate keeps the forward that it wraps
        forward = own.get(name)
        if forward is None or hasattr(forward, "_torchdynamo_orig_callable"):
            continue
        function = getattr(forward, "func", getattr(forward, "__func__", forward))
        # Those of torch.compile, accelerate and packed weights compute the same as the module's class.
        if function is not type(module).forward and not str(function.__module__).startswith(("accelerate.", "hf_ssd.")):
            return forward
    return None


def describe(model: PreTrainedModel) -> str:
    """Names the hooks, forwards and active adapters of a model, for a message. An empty string if it has none."""
    named = [f"the global forward hook `{_name(hook)}`" for hooks in GLOBAL_HOOKS for hook in hooks.values()]
    for path, module in model.named_modules():
        place = f"`{path}`" if path else "the model"
        named += [f"the forward hook `{_name(hook)}` on {place}" for _, hook in hooks_of(module)]
        if forward_of(module) is not None:
            named.append(f"`{_name(forward_of(module))}` in place of the `forward` of {place}")
    named += [f"the adapter {name!r}" for name in active_adapters(attached_to(model))]
    others = f" and {len(named) - 2} more" if len(named) > 3 else ""
    return " and ".join(named[: 2 if others else 3]) + others


def active_adapters(attached: Attached) -> list[str]:
    """Returns the names of the adapters that are computed beside the weights."""
    return sorted({name for active, is_disabled, _ in attached.adapters if not is_disabled for name in active})


def activated_loras(model: PreTrainedModel) -> list[str]:
    """Returns the names of active adapters that are activated LoRAs (aLoRA), which act after certain tokens."""
    configs = vars(model).get("peft_config") or {}
    named = [name for name, config in configs.items() if getattr(config, "alora_invocation_tokens", None)]
    return sorted({*named} & {*active_adapters(attached_to(model))}) if named else []


def _name(function: Callable) -> str:
    function = getattr(function, "func", function)  # of functools.partial
    return getattr(function, "__qualname__", type(function).__qualname__)
