"""
A GPU made of host memory: tensors that say they are on `cuda:0`, hold real numbers, and refuse what CUDA refuses. Every
call that lets the host wait for the device is noted.

torch's `FakeTensorMode` holds no numbers, so what depends on them cannot run under it, and in a build of torch without
CUDA it cannot index a tensor of that device.
"""

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda", 0)

# What needs a number of the device, and how often.
READS = {
    **dict.fromkeys((Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__), 1),
    **dict.fromkeys((Tensor.__index__, Tensor.is_nonzero, Tensor.__contains__, Tensor.__format__, Tensor.__repr__), 1),
    **dict.fromkeys((torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere), 1),
    **dict.fromkeys((torch.masked_select, Tensor.masked_select, torch.bincount, Tensor.bincount), 1),
    **dict.fromkeys((torch.unique, Tensor.unique, torch.unique_consecutive, Tensor.unique_consecutive), 1),
    **dict.fromkeys((torch.equal, Tensor.equal, torch.allclose, Tensor.allclose), 1),
    **dict.fromkeys((torch.multinomial, Tensor.multinomial), 2),  # are these probabilities, and not all zero?
}
MOVES = {Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.type_as}
INDEXES = {Tensor.__getitem__, Tensor.__setitem__}
ANY_DEVICE = MOVES | INDEXES | {Tensor.copy_}
MAKES = {torch.tensor, torch.as_tensor, torch.asarray}


class OnGPU(Tensor):
    """A tensor of the stand-in. Views of it are of the same kind, and share its memory."""

    device = property(lambda self: GPU)
    is_cuda, is_cpu = property(lambda self: True), property(lambda self: False)

    def __deepcopy__(self, memo):
        return self.clone()


class Event:
    """Copies to the host arrive when it is asked for the second time."""

    def __init__(self, gpu: "StandInGPU"):
        self.gpu, self.asked, self.before = gpu, 0, []

    def record(self, stream) -> None:
        self.before, self.gpu.coming = self.gpu.coming, []

    def query(self) -> bool:
        self.asked += 1
        while self.asked > 1 and self.before:
            target, source = self.before.pop()
            target.copy_(source)
        return self.asked > 1


class StandInGPU(TorchFunctionMode):
    """While it is active, tensors can be made on `cuda` and moved there."""

    def __init__(self):
        super().__init__()
        self.visits: list[tuple[str, Counter[str]]] = []  # each phase that was told to begin, and the waits in it
        self.operations = 0  # that the device was asked for
        self.coming: list[tuple[Tensor, Tensor]] = []  # copies to the host that have not arrived, with their source
        self.begin("")

    def __enter__(self):
        self.patches, generator = pytest.MonkeyPatch(), torch.Generator
        self.patches.setattr(torch, "Generator", lambda device="cpu": generator())
        self.patches.setattr(torch.cuda, "Event", lambda: Event(self))
        for module in (torch.cuda, torch.accelerator):
            self.patches.setattr(module, "current_stream", lambda device=None: self)
            self.patches.setattr(module, "synchronize", lambda device=None: self.synchronize())
        return super().__enter__()

    def __exit__(self, *arguments):
        self.patches.undo()
        return super().__exit__(*arguments)

    def begin(self, phase: str) -> None:
        """What waits from now on does so in this phase."""
        self.now = (phase, Counter())
        self.visits.append(self.now)

    @property
    def waits(self) -> Counter:
        """The waits of all phases."""
        return sum((waits for _, waits in self.visits), Counter())

    def synchronize(self) -> None:
        """This object is the device's only stream too."""
        self._note("synchronize")

    def _note(self, what: str, times: int = 1) -> None:
        self.now[1][what] += times

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        any_here = any(isinstance(tensor, OnGPU) for tensor in tensors)
        asks = func.__name__ != "__get__"  # a shape is known
        self.operations += asks and (any_here or torch.device(kwargs.get("device") or "cpu").type == "cuda")
        if func in (Tensor.numpy, Tensor.__array__) and any_here:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first.")
        if func not in ANY_DEVICE and any_here and not all(isinstance(t, OnGPU) or not t.dim() for t in tensors):
            raise RuntimeError(f"{func.__name__}: expected all tensors to be on the same device, found {GPU} and cpu")
        if func is Tensor.pin_memory:
            pinned = args[0].clone()
            pinned.is_pinned_here = True
            return pinned
        if func in MOVES:
            return self._move(func, *args, **kwargs)
        if func in INDEXES:
            self._index(*args)
        if func is Tensor.copy_:
            self._copy(args[0], args[1], kwargs.get("non_blocking") or args[2:] == (True,))
        if func in READS and any_here:
            self._note(func.__name__, READS[func])
        if kwargs.get("device") is not None:
            any_here = torch.device(kwargs["device"]).type == "cuda"
            kwargs["device"] = torch.device("cpu")
            if func in MAKES and any_here and not any(isinstance(tensor, OnGPU) for tensor in tensors):
                self._note(func.__name__)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return _on_gpu(result) if any_here else result

    def _move(self, func, source, *args, **kwargs):
        """`.to(...)` and the like: another device has another memory, and the host waits for the copy."""
        device = {Tensor.cpu: torch.device("cpu"), Tensor.cuda: GPU}.get(func, kwargs.pop("device", None))
        if args and isinstance(args[0], Tensor):
            device, args = args[0].device, (args[0].dtype, *args[1:])
        elif args and isinstance(args[0], (str, torch.device)):
            device, args = args[0], args[1:]
        here = isinstance(source, OnGPU) if device is None else torch.device(device).type == "cuda"
        with torch._C.DisableTorchFunctionSubclass():
            result = Tensor.to(source, *args, **kwargs) if args or kwargs else source
            if here != isinstance(source, OnGPU):
                result = result.clone()
        result = result.as_subclass(OnGPU if here else Tensor)
        if kwargs.get("non_blocking") and isinstance(source, OnGPU) and not here:  # into memory that is pinned
            self.coming.append((result, result.clone()))
            result.fill_(0)
            return result
        self._copy(result, source, kwargs.get("non_blocking"))
        return result

    def _copy(self, target: Tensor, source: Tensor, non_blocking) -> None:
        to_here, from_here = isinstance(target, OnGPU), isinstance(source, OnGPU)
        goes_on_by_itself = to_here and non_blocking and getattr(source, "is_pinned_here", False)
        if to_here != from_here and source.numel() and not goes_on_by_itself:
            self._note("copy from host" if to_here else "copy to host")

    def _index(self, tensor: Tensor, index, *value) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        for part in parts:
            is_here = isinstance(part, OnGPU)
            if not isinstance(tensor, OnGPU):
                if is_here and part.dim():
                    raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor")
            elif isinstance(part, slice):
                for _ in filter(lambda bound: isinstance(bound, OnGPU), (part.start, part.stop, part.step)):
                    self._note("index as a number")
            elif is_here and part.dtype == torch.bool:
                self._note("boolean index")
            elif is_here and not part.dim():
                self._note("index as a number")
            elif isinstance(part, (list, range)) or (isinstance(part, Tensor) and part.dim() and not is_here):
                self._note("index on the host")
        if value and isinstance(value[0], Tensor) and value[0].dim():
            self._copy(tensor, value[0], False)


def to_gpu(model: torch.nn.Module) -> torch.nn.Module:
    """Moves a model to the stand-in, in place."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(_on_gpu(parameter.detach()), requires_grad=False)
        for name, buffer in module._buffers.items():
            module._buffers[name] = _on_gpu(buffer)
    return model


def _on_gpu(value):
    """Makes tensors of a result such of the stand-in."""
    if isinstance(value, Tensor) and not isinstance(value, OnGPU):
        return value.as_subclass(OnGPU)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)([_on_gpu(one) for one in value])
    return value
