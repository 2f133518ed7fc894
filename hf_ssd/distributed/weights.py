"""A copy of a model's weights in memory that worker processes map, and the model that they rebuild over it."""

import contextlib
import json
import mmap
import os
import pkgutil
import threading
import weakref

import torch
from transformers import PreTrainedModel

from ..cache.attached import forward_of, hooks_of, values_of
from .meeting import anonymous_file

ALIGNMENT = 64  # bytes


class SharedWeights:
    """A copy of a model's parameters and buffers in shared memory. The model is only read, and not kept alive."""

    def __init__(self, model: PreTrainedModel):
        self.model = weakref.ref(model)
        self.lock, self.version = threading.RLock(), -1  # the version of the first copy is 0
        self.descriptor = None  # of the memory, until it is freed
        self.lay_out()

    def fits(self) -> bool:
        """Whether the model still has the layers, shapes and dtypes that were laid out, or was deleted."""
        model = self.model()
        return model is None or structure_of(model) == self.structure

    def lay_out(self) -> None:
        """Makes memory for the model as it is now. Workers that use the earlier memory must have ended."""
        model = self.model()
        recipe, structure = recipe_for(model), structure_of(model)
        _, entries, size = structure
        with self.lock:
            self.close()
            self.structure, self.recipe = structure, {**recipe, "entries": entries, "size": size}
            self.descriptor, self.values = anonymous_file(), None  # so no file is left behind by any end of a process
            os.ftruncate(self.descriptor, size)
            os.set_inheritable(self.descriptor, True)
            self.memory = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)

    @property
    def description(self) -> dict:
        """The data that the other process needs besides the inherited descriptor, as objects that JSON can hold."""
        return {**self.recipe, "descriptor": self.descriptor, "version": self.version}

    @torch.no_grad()
    def fill(self) -> int:
        """Copies the weights if they have changed, and returns their version. No worker may be in a call."""
        with self.lock:
            if self.descriptor is None:
                raise RuntimeError("the draft assistant was closed")
            model = self.model()
            if model is None or structure_of(model) != self.structure:
                return self.version  # unchanged until the next call, which lays out the model anew
            named = tensors_of(model)
            tensors = {place: named[name] for name, _, _, place, _ in self.recipe["entries"]}
            values = values_of(tensors.values())
            if values != self.values:
                for place, tensor in tensors.items():
                    _view(self.memory, place, tensor.dtype, tensor.shape).copy_(tensor)
                self.values, self.version = values, self.version + 1
            return self.version

    def close(self) -> None:
        """Frees the memory, except where another process maps it. May be called more than once."""
        with self.lock:
            descriptor, self.descriptor, self.memory = self.descriptor, None, None
            if descriptor is not None:
                os.close(descriptor)


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers under all of their names; tied weights have several."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def structure_of(model: PreTrainedModel) -> tuple[dict[str, str], list[list], int]:
    """Returns what layers, shapes, dtypes and ties decide: the parts, and the places of the tensors in memory."""
    parts, entries, places, size = {}, [], {}, 0
    for name, module in model.named_modules(remove_duplicate=False):
        changed = " with forward hooks" if any(hooks_of(module)) else ""
        changed += " with a forward of its own" if forward_of(module) is not None else ""
        kind = vars(type(module)).get("_ssd_kind", type(module))  # the class that hf_ssd.enable derived from
        parts[name] = _name_of(kind) + changed
    for name, tensor in tensors_of(model).items():
        is_parameter, shape = isinstance(tensor, torch.nn.Parameter), list(tensor.shape)
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        no_plain = "" if is_plain and not tensor.is_quantized else f"no plain tensor, but a {_name_of(type(tensor))}, "
        parts[name] = f"{no_plain}{'a parameter' if is_parameter else 'a buffer'} of shape {shape}"
        if id(tensor) not in places:  # tied weights are a single tensor under several names
            places[id(tensor)] = size
            size += (tensor.numel() * tensor.itemsize // ALIGNMENT + 1) * ALIGNMENT
        entries.append([name, str(tensor.dtype).removeprefix("torch."), shape, places[id(tensor)], is_parameter])
    return parts, entries, size


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _view(memory: torch.Tensor, place: int, dtype: torch.dtype, shape) -> torch.Tensor:
    length = torch.Size(shape).numel() * dtype.itemsize
    return memory[place : place + length].view(dtype).view(shape)


def recipe_for(model: PreTrainedModel) -> dict:
    """Returns the class, config and attention for another process to build the same model, or raises `ValueError`."""
    if any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules()):
        raise ValueError(
            "The draft has adapters in its layers, which a worker cannot rebuild: merge them with "
            "draft.merge_and_unload(), or draft in this process with SSDConfig(asynchronous=False)."
        )
    kind = vars(type(model)).get("_ssd_kind", type(model))  # the class that hf_ssd.enable derived from
    recipe = {
        "model_class": f"{kind.__module__}:{kind.__qualname__}",
        "config_class": f"{type(model.config).__module__}:{type(model.config).__qualname__}",
        "config": json.loads(json.dumps(model.config.to_dict(), default=str)),
        "attention": model.config._attn_implementation,
    }
    is_importable = False
    with contextlib.suppress(ImportError, AttributeError, ValueError):
        is_importable = kind.__module__ != "__main__" and pkgutil.resolve_name(recipe["model_class"]) is kind
    if not is_importable:
        raise ValueError(
            f"The draft's class {type(model).__name__} is defined in {type(model).__module__}, which another process "
            "cannot import; save the draft with save_pretrained() and pass the folder to hf_ssd.launch_draft()."
        )
    for name, tensor in tensors_of(model).items():
        if tensor.device.type == "meta":
            raise ValueError(
                f"Not all weights of the draft are in memory (`{name}` is on disk or was never loaded), so a worker "
                "cannot share them: pass the folder or hub id to hf_ssd.launch_draft() instead of the model."
            )
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


def _difference(model: PreTrainedModel, recipe: dict) -> str | None:
    """Describes a difference from the model that another process would build, or returns `None` if there is none."""
    try:
        (ours, *_), (theirs, *_) = structure_of(model), structure_of(without_weights(recipe))
    except Exception as error:  # the model's own code may raise any exception
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    for name in {**theirs, **ours}:
        is_, would_be = (parts.get(name, "missing") for parts in (ours, theirs))
        is_shared = name not in theirs and is_.startswith(("a parameter", "a buffer"))  # an additional plain tensor
        if is_ != would_be and not is_shared:
            return f"`{name or type(model).__name__}` is {is_} and would be {would_be}"
    return None


# ---------------------------------------------------------------- in the other process


def without_weights(recipe: dict) -> PreTrainedModel:
    """Builds the model with all parameters on `meta`."""
    config = pkgutil.resolve_name(recipe["config_class"]).from_dict(recipe["config"])
    config._attn_implementation = recipe["attention"]
    with torch.device("meta"):
        return pkgutil.resolve_name(recipe["model_class"])(config)


def model_from_shared_weights(description: dict) -> PreTrainedModel:
    model = without_weights(description)
    memory = torch.frombuffer(mmap.mmap(description["descriptor"], description["size"]), dtype=torch.uint8)
    tensors: dict[tuple, torch.Tensor] = {}
    for name, dtype, shape, place, is_parameter in description["entries"]:
        if (place, is_parameter) not in tensors:
            tensor = _view(memory, place, getattr(torch, dtype), shape)
            tensors[place, is_parameter] = torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
        module, _, attribute = name.rpartition(".")
        module = model.get_submodule(module)
        (module._parameters if is_parameter else module._buffers)[attribute] = tensors[place, is_parameter]
    return model.eval()


@torch.no_grad()
def copy_shared_weights(model: PreTrainedModel, description: dict) -> None:
    """Copies the weights again into a rebuilt model that was moved from the shared memory to an accelerator."""
    shared = tensors_of(model_from_shared_weights(description))
    for name, tensor in tensors_of(model).items():
        tensor.copy_(shared[name])
