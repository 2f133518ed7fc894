"""Which columns the layers of a model look at, and which kinds of models are not supported."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.utils.generic import is_flash_attention_requested

from .attached import activated_loras

MASKED_ATTENTION = ("sdpa", "eager")
MOST_OFFSET = 8  # rows that a table of positions may have before its first position
LOW_PRECISION_TOLERANCE, FLOAT32_TOLERANCE = 5e-2, 1e-3  # of the largest logit


def are_close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether logits differ by no more than rounding, or whether integers are equal."""
    if not ours.is_floating_point():
        return torch.equal(ours, theirs)
    tolerance = FLOAT32_TOLERANCE if ours.dtype in (torch.float32, torch.float64) else LOW_PRECISION_TOLERANCE
    differ = torch.where(ours == theirs, 0.0, ours - theirs)  # tokens that the draft lacks are -inf in both
    return bool(differ.abs().max() <= tolerance * theirs.masked_fill(theirs.isinf(), 0).abs().max())


@dataclass(frozen=True)
class AttentionLayout:
    """Which columns the layers of a model look at."""

    window: int | None = None  # positions that sliding layers look back; `None` if no layer slides
    mixed: bool = False  # whether only some layers slide, so that the model takes a mask for each kind
    chunked: bool = False  # whether these do not slide, but see the query's chunk of `window` positions
    recurrent: bool = False  # whether some layers keep a state that cannot be rolled back
    indexed: bool = False  # whether an indexer chooses the columns that a query sees (sparse attention)


def without_wrapper(model):
    """Returns the model in a `PeftModel`, whose layers contain the adapters, and any other model as it is."""
    if isinstance(model, PreTrainedModel) or not hasattr(model, "get_base_model"):
        return model
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            "Prompt and prefix tuning add virtual tokens that only PeftModel.generate() knows; use an adapter that "
            "changes layers, such as LoRA."
        )
    return model.get_base_model()


def check_own_decoding(model: PreTrainedModel) -> None:
    """Raises `ValueError` if plain decoding of a model is not transformers' loop over forward passes of that model."""
    for name in ("_sample", "_has_unfinished_sequences"):
        if getattr(type(model), name) is not getattr(GenerationMixin, name):
            raise ValueError(
                f"{type(model).__name__} decodes by a `{name}` of its own, which speculative decoding does not call; "
                "generate without `ssd_config`."
            )
    activated = activated_loras(model)
    if activated:
        raise ValueError(
            f"The adapter {activated[0]!r} is an activated LoRA (`alora_invocation_tokens`). peft counts from the end "
            "of each forward pass where such an adapter begins to act, so several tokens cannot be verified at once; "
            "disable the adapter, or generate without `ssd_config`."
        )


def is_flash_attention(model: PreTrainedModel) -> bool:
    """Whether the model uses flash attention, which reads no 4D masks and so needs a single row without padding."""
    return is_flash_attention_requested(model.config.get_text_config(decoder=True))


def attention_layout(model: PreTrainedModel) -> AttentionLayout:
    """Returns the layout of a model, or raises `ValueError` if it is not supported."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder model; speculative speculative decoding takes decoder-only models."
        )
    has_own = not model._supports_default_dynamic_cache()
    layers = [] if has_own else DynamicCache(config=config).layers
    recurrent = [layer for layer in layers if isinstance(layer, LinearAttentionLayer)]
    kinds = {type(layer) for layer in layers if layer not in recurrent and type(layer).__name__ != "DummyLayer"}
    is_indexed, known = DynamicIndexedLayer in kinds, {DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer}
    others = ", ".join(sorted(kind.__name__ for kind in kinds - known))
    if has_own or others:
        raise ValueError(
            f"{name} uses a compressed state ({others or 'its own cache'}), which cannot be rolled back to a rejected "
            "token; use a model whose layers have full or sliding-window attention."
        )
    attention = [layer for layer in layers if isinstance(layer, DynamicLayer)]
    if recurrent and not attention:
        raise ValueError(
            f"{name} has recurrent layers alone, whose state cannot be rolled back to a rejected token; use a model "
            "that has layers with attention too."
        )
    if recurrent and is_indexed:
        raise ValueError(
            f"{name} has sparse attention ({DynamicIndexedLayer.__name__}) beside recurrent layers; the indexers of "
            "these models need rows that all grow by equally many tokens; use a model with only one of both."
        )
    windows = {layer.sliding_window for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)}
    if len(windows) > 1:
        raise ValueError(f"{name} has sliding windows of several sizes {sorted(windows)}, which is not supported.")
    slides = {isinstance(layer, DynamicSlidingWindowLayer) for layer in attention}
    is_chunked = "chunked_attention" in (getattr(config, "layer_types", None) or [])
    return AttentionLayout(next(iter(windows), None), len(slides) > 1, is_chunked, bool(recurrent), is_indexed)


def empty_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def is_recurrent(config: PreTrainedConfig) -> bool:
    """Whether some layers of a model with this config keep a recurrent state."""
    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    return any(isinstance(layer, LinearAttentionLayer) for layer in layers)


def last_position_limit(model: PreTrainedModel) -> int | None:
    """Returns the number of positions in a model's table of positions, or `None` if it has no table."""
    count = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not isinstance(count, int):
        return None
    # A table is learned or made with the model. Most rotary embeddings and ALiBi are computed in each pass.
    tokens = model.get_input_embeddings()
    learned = [one.weight for one in model.modules() if isinstance(one, nn.Embedding) and one is not tokens]
    tables = [*learned, *(buffer for buffer in model.buffers() if buffer.dim() == 2)]
    return count if any(count <= len(table) <= count + MOST_OFFSET for table in tables) else None


def last_column_limit(model: PreTrainedModel) -> int | None:
    """Returns from how many columns in its cache on a model scales attention by their number (Llama 4), or `None`."""
    config = model.config.get_text_config(decoder=True)
    scales = getattr(config, "attn_temperature_tuning", False) and not all(getattr(config, "no_rope_layers", [1]))
    return getattr(config, "floor_scale", None) if scales else None


def rope_that_changes(model: PreTrainedModel) -> tuple[str, int] | None:
    """Returns the kind of a rotary embedding that changes with the text's length, and from where on, or `None`."""
    config = model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    for of_layer in [parameters] if "rope_type" in parameters else parameters.values():
        kind = of_layer.get("rope_type", "") if isinstance(of_layer, dict) else ""
        if kind == "longrope":
            return kind, of_layer["original_max_position_embeddings"]
        if "dynamic" in kind:
            return kind, config.max_position_embeddings
    return None


def result_of(outputs) -> torch.Tensor:
    """Returns the logits of a model's outputs, or the hidden states of a head, whose logits are computed afterwards."""
    return outputs.logits if "logits" in outputs else outputs.last_hidden_state
