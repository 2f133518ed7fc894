"""A model's weights in memory that another process maps, so that the model is not copied for it."""

import contextlib
import importlib
import json
import os
import tempfile
import threading

import torch
from transformers import PreTrainedModel

from .process import standard_streams_taken

ALIGNMENT = 64  # bytes


class SharedWeights:
    """
    A place for the parameters and buffers of a model in one block of shared memory: [`~SharedWeights.fill`] copies them
    there, and [`~SharedWeights.adopt`] lets the model work on the copy, so that its own memory is free again.

    The memory has no name (`memfd_create`), so nothing is left behind however the processes end. Where the system has
    no such thing it is an unlinked temporary file.

    Args:
        model (`PreTrainedModel`): A model whose class can be imported by name. On a GPU its weights are copied.

    Attributes:
        description (`dict`): What the other process needs besides the file descriptor, as objects that JSON can hold.

    Raises:
        `ValueError`: another process cannot import the class, or its layers are not those of the class.
    """

    def __init__(self, model: PreTrainedModel):
        model_class = _importable_class(model)
        if any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules()):
            raise ValueError(
                "The draft has adapters in its layers, which a worker cannot rebuild: merge them with "
                "draft.merge_and_unload(), or draft in this process with SSDConfig(asynchronous=False)."
            )
        if getattr(model, "hf_quantizer", None) is not None:
            raise ValueError(
                "The draft is quantized, and a worker cannot rebuild its layers from their weights: let the worker "
                "load it, by hf_ssd.launch_draft(FOLDER_OR_HUB_ID, quantization_config=...)."
            )
        tensors = dict(model.named_parameters(remove_duplicate=False))
        tensors |= dict(model.named_buffers(remove_duplicate=False))
        places, entries, size = {}, [], 0
        for name, tensor in tensors.items():
            if id(tensor) not in places:  # tied weights are one tensor under several names
                places[id(tensor)] = size
                size += (tensor.nbytes // ALIGNMENT + 1) * ALIGNMENT
            dtype, is_parameter = str(tensor.dtype).removeprefix("torch."), isinstance(tensor, torch.nn.Parameter)
            entries.append([name, dtype, list(tensor.shape), places[id(tensor)], is_parameter])
        self.descriptor = _anonymous_file(size)
        memory = _map(self.descriptor, size)
        self.copies = {
            id(tensor): (tensor, _view(memory, places[id(tensor)], tensor.dtype, tensor.shape))
            for tensor in tensors.values()
        }
        self.lock, self.is_filled = threading.Lock(), False
        self.description = {
            "model_class": model_class,
            "config_class": [type(model.config).__module__, type(model.config).__qualname__],
            "config": json.loads(json.dumps(model.config.to_dict(), default=str)),
            "attention": model.config._attn_implementation,
            "entries": entries,
            "size": size,
            "descriptor": self.descriptor,
        }

    @torch.no_grad()
    def fill(self) -> None:
        """Copies the weights, once. It is called by the thread that starts a worker, because it takes some time."""
        with self.lock:
            if not self.is_filled:
                for tensor, shared in self.copies.values():
                    shared.copy_(tensor)
                self.is_filled = True

    def adopt(self) -> None:
        """Lets a model on the CPU work on the filled memory. It must not compute meanwhile."""
        copies, self.copies = self.copies, {}
        for tensor, shared in copies.values():
            if tensor.device.type == "cpu":
                tensor.data = shared

    def close(self) -> None:
        """Closes the descriptor; the memory lives as long as a process maps it. May be called more than once."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def model_from_shared_weights(description: dict) -> PreTrainedModel:
    """Rebuilds the model in the other process over the same memory."""
    config = _import(description["config_class"]).from_dict(description["config"])
    config._attn_implementation = description["attention"]
    with torch.device("meta"):
        model = _import(description["model_class"])(config)
    memory = _map(description["descriptor"], description["size"])
    tensors: dict[tuple, torch.Tensor] = {}
    for name, dtype, shape, place, is_parameter in description["entries"]:
        if (place, is_parameter) not in tensors:
            tensor = _view(memory, place, getattr(torch, dtype), shape)
            tensors[place, is_parameter] = torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
        module, _, attribute = name.rpartition(".")
        module = model.get_submodule(module)
        (module._parameters if is_parameter else module._buffers)[attribute] = tensors[place, is_parameter]
    return model.eval()


def _anonymous_file(size: int) -> int:
    with standard_streams_taken():
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("hf_ssd")
        else:
            descriptor, path = tempfile.mkstemp(prefix="hf_ssd")
            os.unlink(path)
    os.ftruncate(descriptor, size)
    os.set_inheritable(descriptor, True)
    return descriptor


def _map(descriptor: int, size: int) -> torch.Tensor:
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    return torch.from_file(f"{folder}/{descriptor}", shared=True, size=size, dtype=torch.uint8)


def _view(memory: torch.Tensor, place: int, dtype: torch.dtype, shape) -> torch.Tensor:
    length = torch.Size(shape).numel() * dtype.itemsize
    return memory[place : place + length].view(dtype).view(shape)


def _importable_class(model: PreTrainedModel) -> list[str]:
    kind = vars(type(model)).get("_ssd_kind", type(model))  # what hf_ssd.enable made its class from
    place = [kind.__module__, kind.__qualname__]
    with contextlib.suppress(ImportError, AttributeError):
        if kind.__module__ != "__main__" and _import(place) is kind:
            return place
    raise ValueError(
        f"The draft's class {type(model).__name__} is defined in {type(model).__module__}, which another process "
        "cannot import; save the draft with save_pretrained() and pass the folder to hf_ssd.launch_draft()."
    )


def _import(place: list[str]):
    value = importlib.import_module(place[0])
    for name in place[1].split("."):
        value = getattr(value, name)
    return value
