"""A copy of a model's weights in memory that worker processes map."""

import os
import threading
import weakref

import torch
from transformers import PreTrainedModel

from .files import anonymous_file
from .rebuilding import recipe_for, structure_of, tensors_of, without_weights

ALIGNMENT = 64  # bytes
SAMPLES = 4  # least number of values of each tensor that are compared


class SharedWeights:
    """
    A copy of a model's parameters and buffers in one block of shared memory. The model is only read, and not kept
    alive. The memory has no name (`memfd_create`, or an unlinked temporary file), so no file is left behind however the
    processes end.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = weakref.ref(model)
        self.lock, self.version, self.is_closed = threading.Lock(), 0, False
        self.descriptor = self.memory = self.values = None
        self.lay_out()

    def fits(self) -> bool:
        """Whether the model still has the layers, shapes and dtypes that were laid out, or was deleted."""
        model = self.model()
        return model is None or structure_of(model) == self.structure

    def lay_out(self) -> None:
        """Prepares the memory for the model as it is now. Workers that use the earlier memory must have ended."""
        model = self.model()
        recipe = recipe_for(model)
        places, entries, size = {}, [], 0
        for name, tensor in tensors_of(model).items():
            if id(tensor) not in places:  # tied weights are a single tensor under several names
                places[id(tensor)] = size
                size += (tensor.nbytes // ALIGNMENT + 1) * ALIGNMENT
            dtype, is_parameter = str(tensor.dtype).removeprefix("torch."), isinstance(tensor, torch.nn.Parameter)
            entries.append([name, dtype, list(tensor.shape), places[id(tensor)], is_parameter])
        with self.lock:
            self._forget_memory()
            self.structure, self.recipe = structure_of(model), {**recipe, "entries": entries, "size": size}

    @property
    def description(self) -> dict:
        """The data that the other process needs besides the inherited descriptor, as objects that JSON can hold."""
        return {**self.recipe, "descriptor": self.descriptor, "version": self.version}

    @torch.no_grad()
    def fill(self) -> int:
        """Copies the weights if they have changed, and returns their version. No worker may be in a call."""
        with self.lock:
            if self.is_closed:
                raise RuntimeError("the draft assistant was closed")
            if self.descriptor is None:
                self.descriptor = anonymous_file()
                os.ftruncate(self.descriptor, self.recipe["size"])
                os.set_inheritable(self.descriptor, True)
                self.memory = _map(self.descriptor, self.recipe["size"])
            model = self.model()
            if model is None or structure_of(model) != self.structure:
                return self.version  # unchanged until the next call, which lays out the model anew
            places = [place for _, _, _, place, _ in self.recipe["entries"]]
            tensors = dict(zip(places, tensors_of(model).values()))
            values = _values(tensors.values())
            if values != self.values:
                for place, tensor in tensors.items():
                    _view(self.memory, place, tensor.dtype, tensor.shape).copy_(tensor)
                self.values, self.version = values, self.version + 1
            return self.version

    def close(self) -> None:
        """Frees the memory, except where another process maps it. May be called more than once."""
        with self.lock:
            self.is_closed = True
            self._forget_memory()

    def _forget_memory(self) -> None:
        descriptor, self.descriptor, self.memory, self.values = self.descriptor, None, None, None
        if descriptor is not None:
            os.close(descriptor)


def model_from_shared_weights(description: dict) -> PreTrainedModel:
    """Rebuilds the model in the other process over the same memory."""
    model = without_weights(description)
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


@torch.no_grad()
def copy_shared_weights(model: PreTrainedModel, description: dict) -> None:
    """Copies the weights again into a rebuilt model that was moved from the shared memory to an accelerator."""
    shared = tensors_of(model_from_shared_weights(description))
    for name, tensor in tensors_of(model).items():
        tensor.copy_(shared[name])


def _values(tensors) -> tuple:
    """Returns marks that change when the tensors' values change."""
    marks, some = [], {}
    for tensor in tensors:
        marks.append((tensor.data_ptr(), None if tensor.is_inference() else tensor._version))
        if tensor.is_contiguous() and tensor.numel():
            # Changes through `.data` or numpy leave addresses and versions as they are.
            few = tensor.detach().view(-1)[:: max(1, tensor.numel() // SAMPLES)]
            some.setdefault((tensor.device, tensor.dtype), []).append(few)
    return marks, [torch.cat(of_kind).view(torch.uint8).tolist() for of_kind in some.values()]


def _map(descriptor: int, size: int) -> torch.Tensor:
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    return torch.from_file(f"{folder}/{descriptor}", shared=True, size=size, dtype=torch.uint8)


def _view(memory: torch.Tensor, place: int, dtype: torch.dtype, shape) -> torch.Tensor:
    length = torch.Size(shape).numel() * dtype.itemsize
    return memory[place : place + length].view(dtype).view(shape)
