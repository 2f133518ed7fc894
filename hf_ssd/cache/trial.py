"""The trial of a model before its first call: whether a token has the same logits beside other tokens as alone."""

import weakref

import torch
from transformers import PreTrainedModel

from .. import devices
from . import packed
from .attached import Attached, active_adapters, attached_to, describe
from .cached_model import view_for_passes
from .compiled import uncompiled
from .readings import PROMPT, logits_alone, read, texts_for
from .recurrent import WORTH_A_PASS, NoState
from .support import FLOAT32_TOLERANCE, LOW_PRECISION_TOLERANCE, MASKED_ATTENTION, attention_layout, is_flash_attention

DRAFTED = 2  # tokens that are verified after the prompt, in a model without parts that its user has attached
# In low precision most of so many positions side by side must be the same. Passes of the trial have MORE tokens than
# those of the call, so that a hook that acts from a token of a pass on changes most of the last positions.
NEIGHBORS, MORE = 6, 3
KEPT = 8  # states in which a model has passed that are remembered

_tried: "weakref.WeakKeyDictionary[PreTrainedModel, list[tuple]]" = weakref.WeakKeyDictionary()


def check_supported(
    model: PreTrainedModel,
    drafts: bool = False,
    rows: int = 1,
    lookahead: int = DRAFTED,
    pack_weights: bool | str = False,
) -> None:
    """
    Raises `ValueError` if a model's cache cannot be rolled back, or it does not obey a 4D attention mask and explicit
    positions. The passes that test this run again when anything has changed that they depend on.
    """
    name = type(model).__name__
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    attached = attached_to(model)  # in 1 ms for 200 layers: each call asks
    drops_cache = model.training and any(getattr(one, "gradient_checkpointing", False) for one in model.modules())
    # A draft's logits may depend on other tokens and rows, which lowers acceptance but never changes the output.
    drafted = lookahead + MORE if attached.may_depend_on_tokens and not drafts else DRAFTED
    rows = rows if attached.may_depend_on_rows and not drafts else None
    if rows is not None and attention_layout(model).recurrent:
        drafted += WORTH_A_PASS  # tokens that a pass may be fed again
    numbers = model.dtype, model.device.type != "meta" and _is_precise(model)
    state = implementation, numbers, model.training, drops_cache, attached, drafts, drafted, rows
    if state in _tried.get(model, ()):
        return
    attention_layout(model)
    is_offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    if not is_offloaded and any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise ValueError(f"{name} has no weights, only their shapes (device `meta`); load them first.")
    if drops_cache:
        raise ValueError(
            f"{name} is in training mode with gradient checkpointing, in which transformers keeps no cache; call "
            "model.eval() before generate()."
        )
    reads_2d_masks = is_flash_attention(model)
    if implementation not in MASKED_ATTENTION and not reads_2d_masks:
        raise ValueError(
            f"{name} uses attn_implementation={implementation!r}, which takes no 4D masks; load it "
            'with attn_implementation="sdpa" or call model.set_attn_implementation("sdpa").'
        )
    if not reads_2d_masks or drafted > DRAFTED:
        try:
            with uncompiled(model):
                view = view_for_passes(model, pack_weights=pack_weights)  # which takes half the time if they are packed
                _try(model, view, drafts, attached, drafted, rows)
        except ValueError:
            packed.forget(model)
            raise
    _tried[model] = [*_tried.get(model, ()), state][-KEPT:]


@torch.inference_mode()
def _try(
    model: PreTrainedModel, view: PreTrainedModel, drafts: bool, attached: Attached, drafted: int, rows: int | None
) -> None:
    """Compares the logits of a short text that is read alone with its logits beside other tokens and rows."""
    name = type(model).__name__
    is_recurrent = attention_layout(model).recurrent
    texts = texts_for(model, drafted, rows)
    is_plain = not (attached.may_depend_on_rows or active_adapters(attached))
    forgets = (
        f"{name} gives other logits for several tokens behind its recurrent state than for one after the other, so it "
        "cannot verify or draft several tokens at once."
    )
    try:
        alone, beside, masked, is_low = read(model, view, texts, drafts)
    except (TypeError, RuntimeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        if is_plain and isinstance(error, NoState):
            raise ValueError(forgets) from error
        if is_plain:
            raise ValueError(f"{name} does not take a 4D attention mask and position ids: {error!r}.") from error
        raise ValueError(f"{name} cannot verify or draft several tokens with {describe(model)}: {error!r}.") from error
    is_precise = _is_precise(model) and not is_low
    same_beside = _are_same(beside, alone[:, PROMPT - beside.shape[1] : PROMPT], is_precise)
    same_masked = _are_same(masked, alone[:, PROMPT:], is_precise)
    if same_masked and same_beside:
        return
    if model.training:
        raise ValueError(
            f"{name} is in training mode, in which dropout changes every forward pass; call model.eval() before "
            "generate()."
        )
    if drafts and not same_beside and not is_recurrent:
        return
    if not is_plain:
        raise ValueError(
            f"{name} gives other logits for several tokens at once than for one token after the other, with "
            f"{describe(model)}. Verifying several tokens at once would give other tokens than plain generate(); "
            "remove it, or generate without `ssd_config`."
        )
    if not drafts and _are_same(masked, logits_alone(model, texts)[:, PROMPT:], is_precise):
        raise ValueError(
            f"{name} changes its inputs in each step of generate(), by a prepare_inputs_for_generation() or "
            "_update_model_kwargs_for_generation() of its own, which verification does not call; generate without "
            "`ssd_config`."
        )
    if is_recurrent and (same_beside or drafts):
        raise ValueError(forgets)
    if same_beside:
        raise ValueError(
            f"{name} does not obey a 4D attention mask with position ids, or makes a mask of its own from the number "
            "of columns in its cache, so it cannot verify or draft several tokens at once."
        )
    raise ValueError(
        f"The logits that {name} gives for a token depend on the other tokens and rows of the forward pass, so "
        "verifying several tokens at once would give other tokens than plain generate(). Dynamic quantization of "
        "whole tensors (torch.ao.quantization.quantize_dynamic) does that; load the target without it, or with "
        "weights alone quantized."
    )


def _are_same(logits: torch.Tensor, others: torch.Tensor, is_precise: bool) -> bool:
    """Whether logits `(rows, positions, vocab_size)` differ by no more than rounding."""
    differ = (logits - others).abs().amax(dim=-1) / others.abs().amax(dim=-1)
    if is_precise:
        return bool((differ <= FLOAT32_TOLERANCE).all())
    # If the scores of two experts are nearly equal, rounding may choose the other expert.
    neighbors = differ.unfold(1, min(NEIGHBORS, differ.shape[1]), 1)
    return bool((neighbors.median(dim=-1).values <= LOW_PRECISION_TOLERANCE).all())


def _is_precise(model: PreTrainedModel) -> bool:
    """Whether the model computes in float32, as far as torch and transformers say."""
    device = devices.of_model(model)
    is_float = model.dtype in (torch.float32, torch.float64) and getattr(model, "hf_quantizer", None) is None
    return is_float and devices.multiplies_in_float32(device) and not torch.is_autocast_enabled(device.type)
