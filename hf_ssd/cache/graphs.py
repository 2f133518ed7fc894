"""Passes of a model that are captured once and replayed as CUDA graphs, and the storage that they read and write."""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from .. import devices
from .ragged import RaggedCache
from .support import attention_layout, is_flash_attention, rope_that_changes

COLUMNS_AHEAD = 4096  # at most so many for the longest text of a call, or twice the columns in use if that is more
BRANCH_COLUMNS = 512  # columns for branches after the text
COMPARED = 2  # replays of each pass that are compared with eager passes: they differ if a Python number has changed


def rounded(size: int, step: int = 1) -> int:
    """Rounds up to a multiple of `step`, with at most four sizes between successive powers of two."""
    step = max(step, power_of_two(size) // 8)
    return -(-size // step) * step


def power_of_two(size: int) -> int:
    """Returns the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


class CudaCapture:
    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()  # of memory that all graphs share

    def __call__(self, forward: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """Returns the tensor in which a pass leaves its result until the next replay, and a function for replays."""
        # If a capture fails, torch would stay in the inner stream. This context restores the current stream.
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream(self.device)):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                forward()  # libraries allocate memory and choose kernels the first time
            torch.cuda.current_stream().wait_stream(self.stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as those of device links, may use the device during the capture.
            with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                result = forward()
        return result, graph.replay


CAPTURES: dict[str, Callable] = {"cuda": CudaCapture}  # by kind of device


def are_wanted(model: PreTrainedModel, cuda_graphs: bool | str) -> bool:
    """Whether passes of a model are to be captured with this setting, see `SSDConfig`."""
    return cuda_graphs is True or (cuda_graphs == "auto" and devices.of_model(model).type in CAPTURES)


@dataclass
class CapturedPass:
    """A pass that can be repeated, with the tensors that it reads and writes."""

    inputs: dict
    logits: torch.Tensor  # (rows, tokens, vocab_size)
    replay: Callable[[], None]
    to_compare: int = COMPARED  # further replays that are compared with eager passes

    def __call__(self, inputs: dict, tokens: int) -> torch.Tensor:
        """Repeats the pass. Returns a copy of the first logits, because the next replay overwrites them."""
        fill(self.inputs, inputs)
        self.replay()
        return self.logits[:, :tokens].clone()


class Graphs:
    """Storage and captured passes of a model, which a single cache uses at a time."""

    def __init__(self, model: PreTrainedModel):
        device = devices.of_model(model)
        self.capture = CAPTURES[device.type](device)
        self.passes: dict[tuple, CapturedPass] = {}  # by their rows, tokens, columns, inputs and kept logits
        self.storage: list[tuple[torch.Tensor, torch.Tensor]] = []  # by layer: (rows, heads, columns, head_dim)
        self.user: Callable[[], RaggedCache | None] = lambda: None
        self.lock = threading.Lock()
        self.failure: str | None = None  # why a pass could not be captured; all passes run eagerly from then on

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Graphs":
        """Returns a model's graphs: new graphs if its weights have moved or its attention implementation differs."""
        implementation = model.config.get_text_config(decoder=True)._attn_implementation
        state = implementation, *(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
        before, graphs = _graphs.get(model, (None, None))
        if state != before:
            graphs = cls(model)
            _graphs[model] = state, graphs
        return graphs

    def take_in(self, cache: RaggedCache, columns: int, limit: int | None) -> bool:
        """Moves a cache's keys and values to the storage if needed. Returns `False` if another cache is in use."""
        with self.lock:
            user = self.user()
            if user is not None and user is not cache:
                return False
            self.user = weakref.ref(cache)
        first = cache.layers[0].keys
        rows, _, room, _ = self.storage[0][0].shape if self.storage else (0,) * 4
        if room >= columns and first.data_ptr() == self.storage[0][0].data_ptr():
            return True
        if user is None:
            longest = max(COLUMNS_AHEAD, 2 * columns)
            columns = max(columns, longest if limit is None else min(limit + BRANCH_COLUMNS, longest))
        if rows < len(first) or room < columns:
            rows, room = power_of_two(max(rows, len(first))), power_of_two(max(room, columns))
            self.passes.clear()
            self.storage.clear()
        cache.set_window(None)
        for index, layer in enumerate(cache.layers):
            both = layer.keys, layer.values
            if index == len(self.storage):
                with torch.inference_mode(False):
                    self.storage.append(tuple(now.new_empty(rows, now.shape[1], room, now.shape[3]) for now in both))
            for now, kept in zip(both, self.storage[index]):
                shared = min(room, now.shape[2])
                kept.zero_()
                kept[: len(now), :, :shared] = now[:, :, :shared]
            layer.keys, layer.values = (kept[: len(first)] for kept in self.storage[index])
        return True


_graphs: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[tuple, Graphs]]" = weakref.WeakKeyDictionary()


def why_not_captured(model: PreTrainedModel) -> str | None:
    """Returns the known reason why passes of a model cannot be captured, or `None` if there is no such reason."""
    device = devices.of_model(model)
    tensors = [*model.parameters(), *model.buffers()]
    is_shared = any(tensor.device != device or hasattr(tensor, "device_mesh") for tensor in tensors)
    reasons = {
        f"is on {device}": device.type not in CAPTURES,
        "is on several devices": is_shared,
        "has hooks": any(m._forward_hooks or m._forward_pre_hooks or hasattr(m, "_hf_hook") for m in model.modules()),
        "has adapters": any(hasattr(module, "base_layer") for module in model.modules()),
        "is in training mode": model.training,
        "runs under autocast": torch.is_autocast_enabled(device.type),
        "has sparse attention, whose indexer has keys of its own": attention_layout(model).indexed,
        "uses flash attention, which takes lengths in place of a mask": is_flash_attention(model),
        "has a rotary embedding that depends on the length of the text": rope_that_changes(model) is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def static_copy(inputs: dict, tokens: int) -> dict:
    """Returns new tensors that contain `inputs`, padded to `tokens` tokens of each row."""
    with torch.inference_mode(False):
        static = tree_map(
            lambda one: one.new_empty([tokens if i == _axis(one) else n for i, n in enumerate(one.shape)]), inputs
        )
    fill(static, inputs)
    return static


def fill(static: dict, inputs: dict) -> None:
    """Copies inputs into tensors that have at least as many tokens. Further tokens repeat the last token."""
    for kept, one in zip(tree_leaves(static), tree_leaves(inputs), strict=True):
        axis = _axis(one)
        count, missing = one.shape[axis], kept.shape[axis] - one.shape[axis]
        kept.narrow(axis, 0, count).copy_(one)
        if missing:
            kept.narrow(axis, count, missing).copy_(one.narrow(axis, count - 1, 1))


def _axis(tensor: torch.Tensor) -> int:
    """Returns the axis of the tokens in an input."""
    # The states (rows, tokens, width) that a head reads; or (rows, tokens), (2, rows, tokens), (rows, 1, tokens, ...).
    return 1 if tensor.dim() == 3 and tensor.is_floating_point() else min(2, tensor.dim() - 1)
