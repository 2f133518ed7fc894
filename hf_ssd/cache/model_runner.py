"""
How a model's passes over new tokens run: eagerly, compiled by torch.compile, or captured and replayed as CUDA graphs.
All three take the same inputs and return the same logits.
"""

import math

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .. import devices
from .cache_name import cache_argument
from .compiled import FEWEST_TOKENS, call_compiled, is_compiled, uncompiled, why_not_compiled
from .graphs import CAPTURES, CapturedPass, Graphs, power_of_two, rounded, static_copy, why_not_captured
from .ragged import RaggedCache
from .support import are_close, attention_layout, is_flash_attention, result_of

LONGEST_STEP = 64  # tokens of each row; a longer pass is a prefill, which always runs eagerly
WINDOW_STEP = 64  # columns by which a window grows
SHORTEST_CHUNK = 16  # tokens; the chunks of Mamba-2's kernels are powers of 2
MOST_PASSES = 128  # captured passes that are kept; a service may see batches of many sizes

logger = logging.get_logger(__name__)


class Runner:
    """Runs passes of a view of a model eagerly."""

    fewest_tokens = 1  # of each row in a pass

    def __init__(self, model: PreTrainedModel, cache: RaggedCache, view: PreTrainedModel):
        self.model, self.cache, self.view = model, cache, view
        self.preparations = 0  # how often a pass was compiled or captured
        self.takes_logits_to_keep = model._supports_logits_to_keep()  # which takes time in each pass
        self.cache_argument = cache_argument(model)
        self.is_compiled = is_compiled(model)

    def rows(self, unfinished: int) -> int:
        """Returns how many rows a pass computes if `unfinished` rows are not finished."""
        return max(self.fewest_tokens, unfinished)

    def window(self, width: int) -> int | None:
        """Returns the cache's window for steps that use `width` columns, `None` if they see exactly these columns."""
        return None

    def run(self, inputs: dict, logits_to_keep: torch.LongTensor | int | None = None) -> torch.Tensor:
        """
        Runs a pass. `inputs` are arguments of the model, with `places` (columns and positions) instead of
        `position_ids`. Returns logits `(rows, positions, vocab_size)`, which later passes do not change.
        """
        _, positions = inputs["places"].unbind()
        inputs = {name: value for name, value in inputs.items() if name != "places"} | {"position_ids": positions}
        if logits_to_keep is not None and self._takes_logits_to_keep():
            inputs, logits_to_keep = {**inputs, "logits_to_keep": logits_to_keep}, None
        inputs |= {self.cache_argument: self.cache, "use_cache": True, "return_dict": True}
        logits = result_of(self._call(inputs))
        if isinstance(logits_to_keep, int):
            return logits[:, -logits_to_keep:]
        return logits if logits_to_keep is None else logits[:, logits_to_keep]

    def _takes_logits_to_keep(self) -> bool:
        return self.takes_logits_to_keep

    def _call(self, inputs: dict):
        if self.is_compiled:
            with uncompiled(self.model):
                return self.view(**inputs)
        return self.view(**inputs)

    def close(self) -> None:
        """Ends the use of the cache."""


class RecurrentRunner(Runner):
    """
    Runs passes of a model with recurrent layers. transformers bounds the step sizes of Mamba-2 only where several
    tokens are computed; these passes have no bounds, except the first one, which reads the prompts. The chunks to which
    transformers pads the tokens are short; chunks only group the arithmetic. All of this is changed in the view alone.
    """

    def __init__(self, model: PreTrainedModel, cache: RaggedCache, view: PreTrainedModel):
        super().__init__(model, cache, view)
        layers = [layer for layer in view.modules() if is_mamba(layer)]
        self.of_model = {layer: (layer.chunk_size, layer.time_step_limit) for layer in layers}

    def run(self, inputs, logits_to_keep=None):
        branches = self.cache.branches
        if branches > 1:  # rows of a batch, whose single tokens stand in `inputs` as tokens of one row
            inputs = {name: _of_branches(value, branches) for name, value in inputs.items()}
        tokens = inputs["input_ids"].shape[1]
        for layer, (size, limit) in self.of_model.items():
            layer.chunk_size = min(size, max(SHORTEST_CHUNK, power_of_two(tokens)))
            layer.time_step_limit = limit if self.cache.is_empty else (0.0, math.inf)
        logits = super().run(inputs, logits_to_keep)
        return logits if branches == 1 else logits.view(-1, branches, logits.shape[-1])


def _of_branches(value, branches: int):
    """Returns an input of rows as an input of branches: tokens, columns and positions, or a mask with a query each."""
    if isinstance(value, dict):
        return {name: _of_branches(one, branches) for name, one in value.items()}
    if value is None or value.dim() < 4:
        return value if value is None else value.flatten(-2).unsqueeze(-1)
    return value.transpose(1, 2).flatten(0, 1).unsqueeze(1)


def is_mamba(module: nn.Module) -> bool:
    """Whether a module is a Mamba-2 layer, whose settings these passes change."""
    return "time_step_limit" in vars(module) and "chunk_size" in vars(module)


class CompiledRunner(Runner):
    """Runs steps compiled. See [`~hf_ssd.cache.compiled`]."""

    fewest_tokens = FEWEST_TOKENS

    def window(self, width):
        return -(-width // WINDOW_STEP) * WINDOW_STEP

    def _takes_logits_to_keep(self):
        return self.cache.window is None and super()._takes_logits_to_keep()

    def _call(self, inputs):
        if self.cache.window is None:
            return super()._call(inputs)
        return call_compiled(self.model, self.view, self._notice, inputs)

    def _notice(self) -> None:
        self.preparations += 1


class GraphRunner(Runner):
    """Replays steps as CUDA graphs. A pass of new sizes is captured; if that fails, all passes run eagerly."""

    def __init__(self, model: PreTrainedModel, cache: RaggedCache, view: PreTrainedModel, limit: int | None):
        super().__init__(model, cache, view)
        self.limit, self.graphs = limit, Graphs.of(model)

    def rows(self, unfinished):
        return power_of_two(max(1, unfinished))

    def window(self, width):
        columns = max(rounded(width, WINDOW_STEP), self.cache.window or 0)
        try:
            is_here = self.graphs.failure is None and self.graphs.take_in(self.cache, columns + 1, self.limit)
        except Exception as error:  # the memory is full, or the device is in trouble
            self._give_up(error)
            is_here = False
        return columns if is_here else None

    def run(self, inputs, logits_to_keep=None):
        cache, graphs = self.cache, self.graphs
        if cache.window is None or graphs.failure is not None:
            return super().run(inputs, logits_to_keep)
        kept = logits_to_keep if isinstance(logits_to_keep, int) else None  # captured; other places are read afterwards
        rows, tokens = inputs["input_ids"].shape[:2]
        key = rows, rounded(tokens), cache.window, len(inputs), kept
        captured = graphs.passes.get(key)
        try:
            if captured is None:
                if len(graphs.passes) >= MOST_PASSES:
                    del graphs.passes[next(iter(graphs.passes))]
                graphs.passes[key] = self._capture(static_copy(inputs, key[1]), kept)
                self.preparations += 1
            logits = graphs.passes[key](inputs, tokens if kept is None else kept)
            if captured is not None and captured.to_compare:
                captured.to_compare -= 1
                eager = super().run(inputs, kept)
                if not are_close(logits, eager):
                    self._give_up("a replay gives other logits")
                    logits = eager
        except Exception as error:  # the model does something that a graph cannot repeat
            self._give_up(error)
            return super().run(inputs, logits_to_keep)
        return logits if logits_to_keep is kept else logits[:, logits_to_keep]

    def close(self):
        try:
            self.graphs.let_go(self.cache)
        except Exception as error:
            self._give_up(error)

    def _capture(self, static: dict, kept: int | None) -> CapturedPass:
        cache, before = self.cache, self.cache.placement
        cache.placement = static["places"][0], cache.window
        try:
            return CapturedPass(static, *self.graphs.capture(lambda: super(GraphRunner, self).run(static, kept)))
        finally:
            cache.placement = before

    def _give_up(self, error: Exception | str) -> None:
        graphs = self.graphs
        if graphs.failure is None:
            graphs.failure = _line(error)
            logger.warning(f"{type(self.model).__name__} runs without CUDA graphs: {graphs.failure}")
        graphs.passes.clear()
        graphs.storage.clear()


def runner_for(
    model: PreTrainedModel, cache: RaggedCache, cuda_graphs: bool | str, limit: int | None, view: PreTrainedModel
) -> Runner:
    """Returns the runner of a model's passes in a call, in which a row has at most `limit` tokens."""
    # Flash attention takes no masks, and only a mask hides the columns of a window that are not in use.
    compiles = is_compiled(model) and why_not_compiled(model) is None and not is_flash_attention(model)
    captures = cuda_graphs is True or (cuda_graphs == "auto" and devices.of_model(model).type in CAPTURES)
    if attention_layout(model).recurrent:  # the other runners have no static storage for states
        if compiles or captures:
            name = type(model).__name__
            logger.warning_once(f"{name} has recurrent layers, so its steps run uncompiled and uncaptured.")
        return RecurrentRunner(model, cache, view)
    if compiles:
        return CompiledRunner(model, cache, view)
    if not captures:
        return Runner(model, cache, view)
    reason = why_not_captured(model)
    if reason is not None:
        logger.warning_once(f"{type(model).__name__} runs without CUDA graphs: it {reason}.")
        return Runner(model, cache, view)
    try:
        return GraphRunner(model, cache, view, limit)
    except Exception as error:  # the device gives no stream or memory for captures
        logger.warning_once(f"{type(model).__name__} runs without CUDA graphs: {_line(error)}")
        return Runner(model, cache, view)


def _line(error: Exception | str) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
