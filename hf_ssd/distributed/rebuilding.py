"""Rebuilds a model in another process from its class and config, and checks that the result is the same model."""

import contextlib
import importlib
import json

import torch
from transformers import PreTrainedModel

from ..cache.attached import hooks_of


def recipe_for(model: PreTrainedModel) -> dict:
    """Returns the class, config and attention for another process to build the same model, or raises `ValueError`."""
    if any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules()):
        raise ValueError(
            "The draft has adapters in its layers, which a worker cannot rebuild: merge them with "
            "draft.merge_and_unload(), or draft in this process with SSDConfig(asynchronous=False)."
        )
    recipe = {
        "model_class": _importable_class(model),
        "config_class": [type(model.config).__module__, type(model.config).__qualname__],
        "config": json.loads(json.dumps(model.config.to_dict(), default=str)),
        "attention": model.config._attn_implementation,
    }
    check_weights(model)
    difference = _difference(model, recipe)
    # A model that transformers dequantized, such as one from a GGUF file on a CPU, still has its quantizer.
    if difference is not None and getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(
            "The draft is quantized, and a worker cannot rebuild its layers from their weights: let the worker "
            "load it, by hf_ssd.launch_draft(FOLDER_OR_HUB_ID, quantization_config=...)."
        )
    if difference is not None:
        raise ValueError(
            f"A worker cannot rebuild the draft from its class and config: {difference}. Save the draft with "
            "save_pretrained() and pass the folder, if it loads as it is now, or draft in this process with "
            "SSDConfig(asynchronous=False)."
        )
    return recipe


def check_weights(model: PreTrainedModel) -> None:
    """Raises `ValueError` for a model whose weights are not all in memory."""
    for name, tensor in tensors_of(model).items():
        if tensor.device.type == "meta":
            raise ValueError(
                f"Not all weights of the draft are in memory (`{name}` is on disk or was never loaded), so a worker "
                "cannot share them: pass the folder or hub id to hf_ssd.launch_draft() instead of the model."
            )


def without_weights(recipe: dict) -> PreTrainedModel:
    """Builds the model with all parameters on `meta`."""
    config = import_(recipe["config_class"]).from_dict(recipe["config"])
    config._attn_implementation = recipe["attention"]
    with torch.device("meta"):
        return import_(recipe["model_class"])(config)


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers under all of their names; tied weights have several."""
    tensors = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                tensors[f"{path}.{name}" if path else name] = tensor
    return tensors


def structure_of(model: PreTrainedModel) -> tuple:
    """Returns values that differ if a model has other layers, shapes, dtypes or ties than before."""
    modules = [(type(module), any(hooks_of(module)), has_own_forward(module)) for module in model.modules()]
    first: dict[int, str] = {}
    return modules, [
        (name, type(tensor), tensor.dtype, tensor.shape, first.setdefault(id(tensor), name))
        for name, tensor in tensors_of(model).items()
    ]


def has_own_forward(module: torch.nn.Module) -> bool:
    """Whether `forward` was replaced, other than by torch.compile or by accelerate, which moves inputs and weights."""
    own = vars(module).get("forward")
    return own is not None and not hasattr(own, "_torchdynamo_orig_callable") and not hasattr(module, "_hf_hook")


def _difference(model: PreTrainedModel, recipe: dict) -> str | None:
    """Describes a difference from the model that another process would build, or returns `None` if there is none."""
    try:
        other = without_weights(recipe)
    except Exception as error:  # the model's own code may raise any exception
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    ours, theirs = (dict(one.named_modules(remove_duplicate=False)) for one in (model, other))
    for name in {**theirs, **ours}:
        if name and type(ours.get(name)) is not type(theirs.get(name)):
            is_, would_be = (_class_name(modules[name]) if name in modules else "missing" for modules in (ours, theirs))
            return f"`{name}` is {is_} and would be {would_be}"
    for name, module in ours.items():
        if any(hooks_of(module)) or has_own_forward(module):
            kind = "forward hooks" if any(hooks_of(module)) else "its own forward"
            return f"`{name or type(model).__name__}` has {kind}"
    ours, theirs = tensors_of(model), tensors_of(other)
    for name, tensor in ours.items():
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not is_plain or tensor.is_quantized:
            return f"`{name}` is no plain tensor, but a {_class_name(tensor)}"
    for name in theirs:  # additional tensors of the model are shared too
        is_, would_be = (_tensor_kind(tensors.get(name)) for tensors in (ours, theirs))
        if is_ != would_be:
            return f"`{name}` is {is_} and would be {would_be}"
    return None


def _class_name(instance) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"


def _tensor_kind(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "missing"
    kind = "a parameter" if isinstance(tensor, torch.nn.Parameter) else "a buffer"
    return f"{kind} of shape {list(tensor.shape)}"


def _importable_class(model: PreTrainedModel) -> list[str]:
    kind = vars(type(model)).get("_ssd_kind", type(model))  # the class that hf_ssd.enable derived from
    place = [kind.__module__, kind.__qualname__]
    with contextlib.suppress(ImportError, AttributeError):
        if kind.__module__ != "__main__" and import_(place) is kind:
            return place
    raise ValueError(
        f"The draft's class {type(model).__name__} is defined in {type(model).__module__}, which another process "
        "cannot import; save the draft with save_pretrained() and pass the folder to hf_ssd.launch_draft()."
    )


def import_(place: list[str]):
    """Returns the class that a module and a qualified name stand for."""
    value = importlib.import_module(place[0])
    for name in place[1].split("."):
        value = getattr(value, name)
    return value
