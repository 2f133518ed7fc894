"""
A graph made of a list: the operations of a pass with the tensors that it was recorded with. A replay repeats them in
these tensors, without any Python of the model. What CUDA refuses while it captures raises here too.
"""

import weakref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hf_ssd.cache import graphs
from hf_ssd.drafting import sampling
from hf_ssd.generation import verification

from .stand_in_gpu import READS

aten = torch.ops.aten
# Their results depend on numbers of the device or of the host, or have a size that does.
NEEDS_NUMBERS = {
    *(aten._local_scalar_dense, aten.lift_fresh, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero),
    *(aten._unique, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount, aten.multinomial),
}


class NotCaptured(RuntimeError):
    """What is done cannot be part of a graph."""


class Tape(TorchDispatchMode):
    """Records operations while it is active."""

    def __init__(self):
        super().__init__()
        self.steps: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        indices = tree_leaves(args[1]) if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) else ()
        is_mask = any(isinstance(one, Tensor) and one.dtype == torch.bool for one in indices)
        is_constant = func.overloadpacket is aten.lift_fresh and not args[0].dim()  # `tensor[...] = 0`
        if is_mask or (func.overloadpacket in NEEDS_NUMBERS and not is_constant):
            raise NotCaptured(f"operation not permitted when stream is capturing: {func}")
        with torch._C.DisableTorchFunction():
            result = func(*args, **(kwargs or {}))
        if not _is_view(func, result, (args, kwargs)):
            self.steps.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.steps:
            again = func(*args, **kwargs)
            for kept, new in zip(tree_leaves(result), tree_leaves(again)):
                if isinstance(kept, Tensor) and kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)


def _is_view(func, result, arguments) -> bool:
    return not func._schema.is_mutable and _places(result) <= _places(arguments)


def _places(values) -> set[int]:
    return {one.untyped_storage().data_ptr() for one in tree_leaves(values) if isinstance(one, Tensor)}


class Launches(TorchDispatchMode):
    """Counts the operations that are no views. What a tape replays is not among them."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            result = func(*args, **(kwargs or {}))
        self.count += not _is_view(func, result, (args, kwargs))
        return result


class Reads(TorchFunctionMode):
    """Refuses functions that read numbers of a tensor, some of which are no operations of a tape."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in READS or func in (Tensor.numpy, Tensor.__array__):
            raise NotCaptured(f"operation not permitted when stream is capturing: {func.__name__}")
        return func(*args, **(kwargs or {}))


class TapeCapture:
    """Takes the place of [`~hf_ssd.cache.graphs.CudaCapture`]. A replay spoils the results of all other passes."""

    made: "list[TapeCapture]" = []  # those of all models

    def __init__(self, device: torch.device):
        self.results: list[Tensor] = []
        self.captured = self.replayed = 0  # passes
        TapeCapture.made.append(self)

    def __call__(self, forward):
        forward()
        with torch.inference_mode(), Reads(), Tape() as tape:
            result = forward()
        self.results.append(result)
        self.captured += 1

        def replay():
            self.replayed += 1
            with torch.inference_mode(), torch._C.DisableTorchFunction(), _disable_current_modes():
                for one in self.results:
                    one.fill_(torch.nan if one.is_floating_point() else 0)
                tape.replay()

        return result, replay


def use_tapes(monkeypatch, device: str = "cpu") -> type[TapeCapture]:
    """Lets models on a kind of device be captured, with no passes kept from before."""
    monkeypatch.setitem(graphs.CAPTURES, device, TapeCapture)
    monkeypatch.setattr(TapeCapture, "made", [])
    monkeypatch.setattr(graphs, "_graphs", weakref.WeakKeyDictionary())
    for module in (sampling, verification):
        monkeypatch.setattr(module, "argmax", lambda scores: scores.argmax(dim=-1))  # on a CPU it is numpy's
    return TapeCapture
