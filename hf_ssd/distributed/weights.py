"""A model's weights in memory that another process maps, so that handing it over copies nothing twice."""

import importlib
import json
import os
import tempfile
import threading

import torch
from transformers import PreTrainedModel

ALIGNMENT = 64  # bytes


class SharedWeights:
    """
    A place for the parameters and buffers of a model in one block of shared memory: [`~SharedWeights.fill`] copies them
    there, and [`~SharedWeights.adopt`] lets the model work on the copy, so that its own memory is free again.

    The memory has no name (`memfd_create`), so nothing is left behind however the processes end; where the system has
    no such thing it is an unlinked temporary file.

    Args:
        model (`PreTrainedModel`): A model whose class can be imported by name. On a GPU its weights are copied.

    Raises:
        `ValueError`: the class cannot be imported by another process.
    """

    def __init__(self, model: PreTrainedModel):
        self.model_class = _importable_class(model)
        tensors = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        self.lock, self.is_filled = threading.Lock(), False
        places: dict[int, int] = {}
        self.entries, size = [], 0
        for name, tensor in tensors.items():
            if id(tensor) not in places:  # tied weights are one tensor under several names
                places[id(tensor)] = size
                size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.entries.append(
                [name, dtype, list(tensor.shape), places[id(tensor)], isinstance(tensor, torch.nn.Parameter)]
            )
        self.size = max(size, ALIGNMENT)
        self.descriptor = _anonymous_file(self.size)
        self.config = model.config.to_dict()
        self.config_class = [type(model.config).__module__, type(model.config).__qualname__]
        self.attention = model.config._attn_implementation
        memory = _map(self.descriptor, self.size)
        self.copies = {
            id(tensor): (tensor, _view(memory, places[id(tensor)], tensor.dtype, tensor.shape))
            for tensor in tensors.values()
        }

    @torch.no_grad()
    def fill(self) -> None:
        """Copies the weights, once. That takes its time, so it is done in the thread that starts a worker."""
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

    def to_dict(self) -> dict:
        """Returns what the other process needs besides the file descriptor, as plain objects that JSON can hold."""
        return {
            "model_class": self.model_class,
            "config_class": self.config_class,
            "config": json.loads(json.dumps(self.config, default=str)),
            "attention": self.attention,
            "entries": self.entries,
            "size": self.size,
            "descriptor": self.descriptor,
        }

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def model_from_shared_weights(values: dict) -> PreTrainedModel:
    """Rebuilds the model in the other process over the same memory. `values` is what `to_dict` gave."""
    config = _import(values["config_class"]).from_dict(values["config"])
    config._attn_implementation = values["attention"]
    with torch.device("meta"):
        model = _import(values["model_class"])(config)
    memory = _map(values["descriptor"], values["size"])
    tensors: dict[tuple, torch.Tensor] = {}
    for name, dtype, shape, place, is_parameter in values["entries"]:
        tensor = tensors.get((place, is_parameter))
        if tensor is None:
            tensor = _view(memory, place, getattr(torch, dtype), shape)
            tensor = torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
            tensors[place, is_parameter] = tensor
        module, _, attribute = name.rpartition(".")
        module = model.get_submodule(module)
        (module._parameters if is_parameter else module._buffers)[attribute] = tensor
    return model.eval()


def _anonymous_file(size: int) -> int:
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
    for kind in type(model).__mro__:
        if not issubclass(kind, PreTrainedModel):
            continue  # a mixin that was put in front, as hf_ssd.enable does
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            break
        try:
            if _import([kind.__module__, kind.__qualname__]) is kind:
                return [kind.__module__, kind.__qualname__]
        except (ImportError, AttributeError):
            break
    raise ValueError(
        f"The draft's class {type(model).__name__} is defined in {type(model).__module__}, which another process "
        "cannot import; save the draft with save_pretrained() and pass the folder to hf_ssd.launch_draft()."
    )


def _import(place: list[str]):
    value = importlib.import_module(place[0])
    for name in place[1].split("."):
        value = getattr(value, name)
    return value
