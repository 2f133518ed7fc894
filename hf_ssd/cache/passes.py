"""How a model's passes run: eagerly, compiled by torch.compile, or captured and replayed as CUDA graphs."""

from transformers import PreTrainedModel
from transformers.utils import logging

from .cached_model import CachedModel
from .compiled import call_compiled, is_compiled, why_not_compiled
from .graphs import CapturedPass, Graphs, are_wanted, power_of_two, rounded, static_copy, why_not_captured
from .ragged import RaggedCache
from .recurrent import RecurrentModel
from .row_store import RowStore
from .support import are_close, is_flash_attention

WINDOW_STEP = 64  # columns by which a window grows
MOST_PASSES = 128  # captured passes that are kept; a service may see batches of many sizes

logger = logging.get_logger(__name__)


class CompiledModel(CachedModel):
    """Runs steps compiled, over a view of the cache that stays the same for many steps."""

    fewest_tokens = 2  # torch.compile treats a size of 1 as a separate case

    def window(self, width):
        return -(-width // WINDOW_STEP) * WINDOW_STEP

    def _call(self, inputs):
        if self.cache.window is None:
            return super()._call(inputs)
        return call_compiled(self.model, self.view, self._notice, inputs)

    def _notice(self) -> None:
        self.preparations += 1


class CapturedModel(CachedModel):
    """Replays steps as CUDA graphs. A pass of new sizes is captured; if that fails, all passes run eagerly."""

    def __init__(self, model: PreTrainedModel, cache: RaggedCache, **options):
        super().__init__(model, cache, **options)
        self.graphs = Graphs.of(model)

    def rows(self, unfinished):
        return power_of_two(max(1, unfinished))

    def window(self, width):
        columns = max(rounded(width, WINDOW_STEP), self.cache.window or 0)
        try:
            is_here = self.graphs.failure is None and self.graphs.take_in(self.cache, columns + 1, self.column_limit)
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
        if self.graphs.user() is self.cache:
            self.graphs.user = lambda: None

    def _capture(self, static: dict, kept: int | None) -> CapturedPass:
        cache, before = self.cache, self.cache.placement
        cache.placement = static["places"][0], cache.window
        try:
            return CapturedPass(static, *self.graphs.capture(lambda: super(CapturedModel, self).run(static, kept)))
        finally:
            cache.placement = before

    def _give_up(self, error: Exception | str) -> None:
        graphs = self.graphs
        if graphs.failure is None:
            graphs.failure = _line(error)
            logger.warning(f"{type(self.model).__name__} runs without CUDA graphs: {graphs.failure}")
        graphs.passes.clear()
        graphs.storage.clear()


def cached_model(
    model: PreTrainedModel,
    cache: RaggedCache,
    cuda_graphs: bool | str = False,
    tokens: RowStore | None = None,
    **options,
) -> CachedModel:
    """Returns the [`CachedModel`] for the passes of a call. Hooks of its `hidden_states` run in eager passes alone."""
    if cache.is_recurrent:
        return RecurrentModel(model, cache, tokens, cuda_graphs, **options)
    # Flash attention takes no masks, and only a mask hides the columns of a window that are not in use.
    compiles = is_compiled(model) and why_not_compiled(model) is None and not is_flash_attention(model)
    if options.get("hidden_states") is None and compiles:
        return CompiledModel(model, cache, **options)
    if options.get("hidden_states") is None and are_wanted(model, cuda_graphs):
        reason = why_not_captured(model)
        try:
            if reason is None:
                return CapturedModel(model, cache, **options)
            reason = f"it {reason}."
        except Exception as error:  # the device gives no stream or memory for captures
            reason = _line(error)
        logger.warning_once(f"{type(model).__name__} runs without CUDA graphs: {reason}")
    return CachedModel(model, cache, **options)


def _line(error: Exception | str) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
