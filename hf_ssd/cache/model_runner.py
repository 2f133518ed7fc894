"""
How a model's passes over new tokens run: eagerly, compiled by torch.compile, or captured and replayed as CUDA graphs.
All three take the same inputs and return the same logits.
"""

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.utils import logging

from .. import devices
from .compiled import FEWEST_TOKENS, call_compiled, is_compiled, uncompiled, why_not_compiled
from .graphs import CAPTURES, CapturedPass, Graphs, power_of_two, rounded, static_copy, why_not_captured
from .ragged import RaggedCache
from .support import are_close, is_flash_attention

LONGEST_STEP = 64  # tokens of each row; a longer pass is a prefill, which always runs eagerly
WINDOW_STEP = 64  # columns by which a window grows

logger = logging.get_logger(__name__)


class Runner:
    """
    Runs passes eagerly.

    Args:
        model (`PreTrainedModel`): The model.
        cache (`RaggedCache`): The model's cache.

    Attributes:
        fewest_tokens (`int`): The smallest number of tokens of each row in a pass.
        preparations (`int`): How often a pass was compiled or captured.
    """

    fewest_tokens = 1

    def __init__(self, model: PreTrainedModel, cache: RaggedCache):
        self.model, self.cache, self.preparations = model, cache, 0
        self.takes_logits_to_keep = model._supports_logits_to_keep()

    def rows(self, unfinished: int) -> int:
        """Returns how many rows a pass computes if `unfinished` rows are not finished."""
        return max(self.fewest_tokens, unfinished)

    def window(self, width: int) -> int | None:
        """Returns the cache's window for steps that use `width` columns, `None` if they see exactly these columns."""
        return None

    def run(self, inputs: dict, logits_to_keep: torch.LongTensor | None = None) -> torch.Tensor:
        """
        Args:
            inputs (`dict`): Arguments of the model besides its cache, which knows its window and the new columns.
            logits_to_keep (`torch.LongTensor`, *optional*): The positions of `inputs` whose logits to return.

        Returns:
            `torch.FloatTensor` of shape `(rows, positions, vocab_size)`: Logits, which later passes do not change.
        """
        if logits_to_keep is not None and self.takes_logits_to_keep:
            inputs, logits_to_keep = {**inputs, "logits_to_keep": logits_to_keep}, None
        with uncompiled(self.model):
            logits = self.model(**inputs, past_key_values=self.cache, use_cache=True, return_dict=True).logits
        return logits if logits_to_keep is None else logits[:, logits_to_keep]

    def close(self) -> None:
        """Ends the use of the cache."""


class CompiledRunner(Runner):
    """Runs steps compiled. See [`~hf_ssd.cache.compiled`]."""

    fewest_tokens = FEWEST_TOKENS

    def window(self, width):
        return -(-width // WINDOW_STEP) * WINDOW_STEP

    def run(self, inputs, logits_to_keep=None):
        if self.cache.window is None:
            return super().run(inputs, logits_to_keep)
        others = {"past_key_values": self.cache, "use_cache": True, "return_dict": True}
        logits = call_compiled(self.model, self._notice, **inputs, **others).logits
        return logits if logits_to_keep is None else logits[:, logits_to_keep]

    def _notice(self) -> None:
        self.preparations += 1


class GraphRunner(Runner):
    """
    Replays steps as CUDA graphs. A pass of new sizes is captured; if that fails, all passes run eagerly.

    Args:
        model, cache: See [`Runner`].
        limit (`int`, *optional*): The most tokens that a row can have.
    """

    def __init__(self, model: PreTrainedModel, cache: RaggedCache, limit: int | None):
        super().__init__(model, cache)
        self.limit, self.graphs = limit, Graphs.of(model)

    def rows(self, unfinished):
        return power_of_two(max(1, unfinished))

    def window(self, width):
        columns = max(rounded(width + 1, WINDOW_STEP), self.cache.window or 0)  # the last column is for padding
        try:
            is_here = self.graphs.failure is None and self.graphs.take_in(self.cache, columns + 1, self.limit)
        except torch.OutOfMemoryError as error:
            self._give_up(error)
            is_here = False
        return columns if is_here else None

    def run(self, inputs, logits_to_keep=None):
        cache, graphs = self.cache, self.graphs
        if cache.window is None or graphs.failure is not None:
            return super().run(inputs, logits_to_keep)
        rows, tokens = inputs["input_ids"].shape[:2]
        key = rows, rounded(tokens), cache.window, len(inputs)
        columns = pad(cache.placement[0], (0, key[1] - tokens), value=cache.window - 1)
        moving = {**inputs, "columns": columns}
        captured = graphs.passes.get(key)
        try:
            if captured is None:
                graphs.passes[key] = self._capture(static_copy(moving, key[1]))
                self.preparations += 1
            logits = graphs.passes[key](moving)
        except Exception as error:  # the model does something that a graph cannot repeat
            self._give_up(error)
            return super().run(inputs, logits_to_keep)
        if captured is not None and captured.to_compare:
            logits, replayed, captured.to_compare = super().run(inputs), logits, captured.to_compare - 1
            if not are_close(replayed, logits):
                self._give_up("a replay gives other logits")
        return logits if logits_to_keep is None else logits[:, logits_to_keep]

    def close(self):
        self.graphs.let_go(self.cache)

    def _capture(self, static: dict) -> CapturedPass:
        cache, before = self.cache, self.cache.placement
        inputs = {name: value for name, value in static.items() if name != "columns"}
        cache.placement = static["columns"], cache.window
        try:
            return CapturedPass(static, *self.graphs.capture(lambda: super(GraphRunner, self).run(inputs)))
        finally:
            cache.placement = before

    def _give_up(self, error: Exception | str) -> None:
        text = str(error).strip() or type(error).__name__
        self.graphs.failure = text.splitlines()[0]
        self.graphs.passes.clear()
        self.graphs.storage.clear()
        logger.warning(f"{type(self.model).__name__} runs without CUDA graphs: {self.graphs.failure}")


def runner_for(model: PreTrainedModel, cache: RaggedCache, cuda_graphs: bool | str, limit: int | None) -> Runner:
    """
    Returns the runner of a model's passes in a call.

    Args:
        model (`PreTrainedModel`), cache (`RaggedCache`): The model and its cache.
        cuda_graphs (`bool` or `str`): See [`SSDConfig`].
        limit (`int`, *optional*): The most tokens that a row can have.
    """
    # Flash attention takes no masks, and only a mask hides the columns of a window that are not in use.
    if is_compiled(model) and why_not_compiled(model) is None and not is_flash_attention(model):
        return CompiledRunner(model, cache)
    if not cuda_graphs or (cuda_graphs == "auto" and devices.of_model(model).type not in CAPTURES):
        return Runner(model, cache)
    reason = why_not_captured(model)
    if reason is not None:
        logger.warning_once(f"{type(model).__name__} runs without CUDA graphs: it {reason}.")
        return Runner(model, cache)
    return GraphRunner(model, cache, limit)
