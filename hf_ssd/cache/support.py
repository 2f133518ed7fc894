"""What a model must be able to do to take part, checked before any work starts."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils.generic import is_flash_attention_requested

from .. import devices
from . import masks
from .compiled import uncompiled

MASKED_ATTENTION = ("sdpa", "eager")
LOW_PRECISION_TOLERANCE, FLOAT32_TOLERANCE = 5e-2, 1e-3  # of the largest logit


@dataclass(frozen=True)
class AttentionLayout:
    """
    Args:
        window (`int`, *optional*): Positions that sliding layers look back. `None` if no layer slides.
        mixed (`bool`): Whether some layers slide and others do not; such a model takes one mask for each kind.
    """

    window: int | None = None
    mixed: bool = False


def without_wrapper(model):
    """
    Returns the transformers model in a `PeftModel`, which has the adapters in its layers; anything else as it is.

    Raises:
        `ValueError`: the adapter is no part of the model.
    """
    if isinstance(model, PreTrainedModel) or not hasattr(model, "get_base_model"):
        return model
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            "Prompt and prefix tuning add virtual tokens that only PeftModel.generate() knows; use an adapter that "
            "changes layers, such as LoRA."
        )
    return model.get_base_model()


def is_flash_attention(model: PreTrainedModel) -> bool:
    """Whether the model uses flash attention, which reads no 4D masks and so needs a single row without padding."""
    return is_flash_attention_requested(model.config.get_text_config(decoder=True))


def attention_layout(model: PreTrainedModel) -> AttentionLayout:
    """
    Returns which columns the layers of a model look at.

    Raises:
        `ValueError`: a layer keeps something else than the keys and values of past tokens, so it cannot be rolled back.
    """
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder model; speculative speculative decoding takes decoder-only models."
        )
    is_recurrent = getattr(model, "_is_stateful", False) or not model._supports_default_dynamic_cache()
    layers = [] if is_recurrent else DynamicCache(config=config).layers
    kinds = {type(layer) for layer in layers if type(layer).__name__ != "DummyLayer"}
    others = ", ".join(sorted(kind.__name__ for kind in kinds - {DynamicLayer, DynamicSlidingWindowLayer}))
    is_chunked = "chunked_attention" in (getattr(config, "layer_types", None) or [])
    if is_recurrent or is_chunked or others:
        what = "chunked attention" if is_chunked else f"a recurrent or compressed state ({others or 'its own cache'})"
        raise ValueError(
            f"{name} uses {what}, which cannot be rolled back to a rejected token; use a model whose layers have full "
            "or sliding-window attention."
        )
    windows = {layer.sliding_window for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)}
    if len(windows) > 1:
        raise ValueError(f"{name} has sliding windows of several sizes {sorted(windows)}, which is not supported.")
    return AttentionLayout(window=next(iter(windows), None), mixed=len(kinds) > 1)


def rope_that_changes(model: PreTrainedModel) -> tuple[str, int] | None:
    """
    Returns the kind of a rotary embedding whose frequencies depend on how long the text is, and the number of positions
    up to which they do not; `None` if the model has no such embedding.
    """
    config = model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    for of_layer in [parameters] if "rope_type" in parameters else parameters.values():
        kind = of_layer.get("rope_type", "") if isinstance(of_layer, dict) else ""
        if kind == "longrope":
            return kind, of_layer["original_max_position_embeddings"]
        if "dynamic" in kind:
            return kind, config.max_position_embeddings
    return None


def check_supported(model: PreTrainedModel) -> None:
    """
    Checks that a model can decode branches: its cache can be rolled back, and it obeys a 4D attention mask and explicit
    positions. A short forward pass tries the latter, once for each attention implementation, dtype and mode.

    Raises:
        `ValueError`: it cannot.
    """
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    state = implementation, model.dtype, model.training
    if getattr(model, "_ssd_supported", None) == state:
        return
    attention_layout(model)
    is_offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    if not is_offloaded and any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no weights, only their shapes (device `meta`); load them first.")
    if not is_flash_attention(model):
        if implementation not in MASKED_ATTENTION:
            raise ValueError(
                f"{type(model).__name__} uses attn_implementation={implementation!r}, which takes no 4D masks; load it "
                'with attn_implementation="sdpa" or call model.set_attn_implementation("sdpa").'
            )
        with uncompiled(model):
            _try_two_alternatives(model)
    model._ssd_supported = state


@torch.inference_mode()
def _try_two_alternatives(model: PreTrainedModel) -> None:
    """Feeds two alternatives for one place, and compares the second one's logits with those it has in its own row."""
    name, device = type(model).__name__, devices.of_model(model)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    first, one, other = (token % vocab_size for token in (7, 11, 13))
    sees = [[[1, 0, 0], [1, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
    try:
        logits = model(
            input_ids=torch.tensor([[first, one, other], [first, other, one]], device=device),
            position_ids=torch.tensor([[0, 1, 1], [0, 1, 2]], device=device),
            attention_mask=masks.additive(torch.tensor(sees, dtype=torch.bool, device=device), model.dtype),
            use_cache=False,
        ).logits
    except (TypeError, RuntimeError, ValueError, IndexError, AttributeError, AssertionError) as error:
        raise ValueError(f"{name} does not take a 4D attention mask and position ids: {error!r}") from error
    alternatives, alone = logits[0, 2], logits[1, 1]
    is_precise = model.dtype in (torch.float32, torch.float64) and getattr(model, "hf_quantizer", None) is None
    tolerance = FLOAT32_TOLERANCE if is_precise else LOW_PRECISION_TOLERANCE
    if (alternatives - alone).abs().max() <= tolerance * alone.abs().max():
        return
    if model.training:
        raise ValueError(
            f"{name} is in training mode, in which dropout changes every forward pass; call model.eval() before "
            "generate()."
        )
    raise ValueError(
        f"{name} does not obey a 4D attention mask with position ids, so it cannot verify or draft several tokens at "
        "once."
    )
