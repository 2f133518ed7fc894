"""The trial of a model before its first call: a few small forward passes show whether its logits can be relied on.

Verification feeds a token beside other tokens, beside rows of other lengths, and after a cache that holds more columns
than the token may see. Only a mask and positions say which columns the token sees. Plain generation feeds the same
token alone. Both must give the same logits.
"""

import weakref

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from .. import devices
from . import masks
from .cache_name import cache_argument
from .cached_model import CachedModel
from .compiled import uncompiled
from .ragged import RaggedCache
from .recurrent import cached_model, ragged_copy
from .recurrent_draft import RecurrentBranches, RecurrentDraft
from .support import (
    FLOAT32_TOLERANCE,
    LOW_PRECISION_TOLERANCE,
    MASKED_ATTENTION,
    attention_layout,
    is_flash_attention,
)

TOKENS = (7, 11, 13, 17, 19, 23, 29, 31)  # the text that is read
PROMPT, DRAFTED = 6, 2  # how many of these tokens are the prompt, and how many are verified after it
FIRST = 2  # how many tokens of the prompt a recurrent draft reads first
# FAR is the number of columns between the text and the end of the cache, if the config names no larger window. A model
# that counts a window from the end of the cache does not see the text then, unless its window is larger. Windows above
# FARTHEST columns are not tried.
FAR, FARTHEST = 640, 4096

_tried: "weakref.WeakKeyDictionary[PreTrainedModel, tuple]" = weakref.WeakKeyDictionary()  # passed in this state


def check_supported(model: PreTrainedModel, drafts: bool = False) -> None:
    """
    Checks that a model can decode branches: its cache can be rolled back, and it obeys a 4D attention mask and explicit
    positions. A few short forward passes test the mask and positions. They run again when the model's attention
    implementation, dtype, mode or kinds of layers have changed.

    Args:
        model (`PreTrainedModel`): The target or the draft.
        drafts (`bool`, *optional*): Whether the model is the draft. A draft's logits may depend on the other tokens and
            rows of a forward pass, which lowers acceptance but never changes the output.

    Raises:
        `ValueError`: the model cannot decode branches.
    """
    name = type(model).__name__
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    kinds = frozenset(map(type, model.modules()))  # quantization replaces layers, also in a copy of the model
    drops_cache = model.training and any(getattr(one, "gradient_checkpointing", False) for one in model.modules())
    state = implementation, model.dtype, model.training, drops_cache, kinds, drafts
    if _tried.get(model) == state:
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
    if not is_flash_attention(model):
        if implementation not in MASKED_ATTENTION:
            raise ValueError(
                f"{name} uses attn_implementation={implementation!r}, which takes no 4D masks; load it "
                'with attn_implementation="sdpa" or call model.set_attn_implementation("sdpa").'
            )
        with uncompiled(model):
            _try(model, drafts)
    _tried[model] = state


@torch.inference_mode()
def _try(model: PreTrainedModel, drafts: bool) -> None:
    """Compares the logits of a short text that is read alone with its logits beside other tokens and rows."""
    name = type(model).__name__
    try:
        read, prompt = _logits_beside_others, PROMPT
        if attention_layout(model).recurrent:
            read, prompt = (_logits_of_branches, FIRST) if drafts else (_logits_behind_states, PROMPT)
        alone, (beside, masked) = _logits_alone(model, prompt), read(model)
    except (TypeError, RuntimeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        raise ValueError(f"{name} does not take a 4D attention mask and position ids: {error!r}.") from error
    same_beside = _are_same(model, beside, alone[PROMPT - len(beside) : PROMPT])
    if same_beside and _are_same(model, masked, alone[PROMPT:]):
        return
    if model.training:
        raise ValueError(
            f"{name} is in training mode, in which dropout changes every forward pass; call model.eval() before "
            "generate()."
        )
    if attention_layout(model).recurrent and (same_beside or drafts):
        raise ValueError(
            f"{name} gives other logits for several tokens behind its recurrent state than for one after the other, so "
            "it cannot verify or draft several tokens at once."
        )
    if same_beside:
        raise ValueError(
            f"{name} does not obey a 4D attention mask with position ids, or makes a mask of its own from the number "
            "of columns in its cache, so it cannot verify or draft several tokens at once."
        )
    if not drafts:
        raise ValueError(
            f"The logits that {name} gives for a token depend on the other tokens and rows of the forward pass, so "
            "verifying several tokens at once would give other tokens than plain generate(). Dynamic quantization of "
            "whole tensors (torch.ao.quantization.quantize_dynamic) does that; load the target without it, or with "
            "weights alone quantized."
        )


def _logits_alone(model: PreTrainedModel, prompt: int) -> torch.Tensor:
    """Returns the logits of the text as plain generation reads it: first `prompt` tokens, then token by token."""
    text, cache = _text(model), DynamicCache(config=model.config.get_text_config(decoder=True))
    logits, start = [], 0
    for count in (prompt, *[1] * (len(text) - prompt)):
        stop = start + count
        outputs = model(
            input_ids=text[None, start:stop],
            position_ids=torch.arange(start, stop, device=text.device)[None],
            attention_mask=torch.ones(1, stop, dtype=torch.long, device=text.device),
            use_cache=True,
            return_dict=True,
            **{cache_argument(model): cache},
        )
        logits.append(outputs.logits[0])
        start = stop
    if cache.get_seq_length() != start:
        raise RuntimeError("it keeps no keys and values in its cache")
    return torch.cat(logits)


def _logits_beside_others(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns the logits of the prompt beside another row, and the logits of the tokens after the prompt as they are
    verified. These tokens stand after a hidden column, in a cache whose other row is much longer.
    """
    text = _text(model)
    device, far = text.device, _far(model)
    decoder = CachedModel(model, RaggedCache(), column_limit=PROMPT + DRAFTED)
    prompts = torch.stack([text[:PROMPT], text[:PROMPT].flip(0)])
    beside = decoder.extend(prompts, [0, 0])[0]
    fed = torch.cat([text[:1], text[PROMPT:]])
    fed = torch.stack([fed, fed.flip(0)])
    count = fed.shape[1]
    columns = torch.tensor([[PROMPT], [far]], device=device) + torch.arange(count, device=device)
    width = decoder.columns_seen(far + count, count)
    of_columns = torch.arange(width, device=device)
    of_columns = of_columns - (of_columns > PROMPT).long()
    of_tokens = columns - (torch.arange(count, device=device) > 0).long()
    allowed = masks.visible_up_to(columns, width)
    allowed[0, 1:, PROMPT] = False
    decoder.cache.place(columns, width)
    places = torch.stack([columns, decoder.positions(of_tokens)])
    masked = decoder.forward(fed, places, decoder.mask(allowed, of_tokens, of_columns))[0, 1:]
    return beside, masked


def _logits_behind_states(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns the logits of [`_logits_beside_others`] for a model with recurrent layers. From the states after the prompt,
    other tokens are verified first and rejected, then the tokens after the prompt. Finally, the last of these tokens is
    verified again, after the tokens before it.
    """
    text, far = _text(model), _far(model)
    cache = ragged_copy(DynamicCache(config=model.config.get_text_config(decoder=True)))
    inputs = {"input_ids": torch.stack([text[:PROMPT], text[:PROMPT].flip(0)]), cache_argument(model): cache}
    beside = model(**inputs, use_cache=True, return_dict=True).logits[0]
    decoder = cached_model(model, cache, column_limit=PROMPT + DRAFTED)
    decoder.checkpoints[1] = far
    for tokens in (text[:DRAFTED], text[PROMPT:]):
        verified = decoder.extend(torch.stack([tokens, tokens.flip(0)]), [PROMPT, far])[0]
    again = decoder.extend(torch.stack([tokens, tokens.flip(0)])[:, 1:], [PROMPT + 1, far + 1])[0]
    return beside, torch.cat([verified[:1], again])


def _logits_of_branches(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns the logits of [`_logits_beside_others`] for a draft with recurrent layers, without those of the first tokens
    of the prompt: a few tokens are fed together, then others behind their states. The tokens after the prompt are a
    branch, which starts from a copy of the states after the prompt and stands beside another branch.
    """
    text = _text(model)
    inputs = torch.stack([text, text.flip(0)])
    decoder = RecurrentDraft(model, rows=2, column_limit=PROMPT + DRAFTED)
    decoder.feed(inputs, [FIRST, FIRST], 0, wanted=1)
    beside = decoder.feed(inputs, [PROMPT - 1, PROMPT - 1], 1, wanted=2)[0]
    forks = torch.full((2, 2), PROMPT, device=text.device)
    branches = RecurrentBranches(decoder, forks, max(PROMPT, _far(model)), DRAFTED)
    tokens = torch.stack([text.flip(0), text])[:, PROMPT:]
    masked = [branches.grow(tokens[:, depth].expand(2, 2))[0, 1] for depth in range(DRAFTED)]
    return beside, torch.stack(masked)


def _text(model: PreTrainedModel) -> torch.LongTensor:
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    tokens = [token % vocab_size for token in TOKENS]
    return torch.tensor(tokens, device=devices.of_model(model))


def _far(model: PreTrainedModel) -> int:
    """
    Returns how many columns the longer row has: more than every window up to `FARTHEST` that the config names, as far
    as the model's positions allow.
    """
    config = model.config.get_text_config(decoder=True)
    named = [value for key, value in vars(config).items() if "window" in key and type(value) is int]
    far = PROMPT + max([FAR, *(window + DRAFTED + 1 for window in named if window <= FARTHEST)])
    positions = getattr(config, "max_position_embeddings", None)
    return far if positions is None else max(PROMPT, min(far, positions - DRAFTED - 1))


def _are_same(model: PreTrainedModel, logits: torch.Tensor, others: torch.Tensor) -> bool:
    """
    Whether logits `(positions, vocab_size)` differ by no more than rounding. In low precision only most positions must
    be the same: if the scores of two experts are nearly equal, rounding may choose the other expert.
    """
    differ = (logits - others).abs().amax(dim=-1) / others.abs().amax(dim=-1)
    if _is_precise(model):
        return bool((differ <= FLOAT32_TOLERANCE).all())
    return bool(differ.median() <= LOW_PRECISION_TOLERANCE)


def _is_precise(model: PreTrainedModel) -> bool:
    """Whether the model computes in float32, as far as torch and transformers say."""
    kind = devices.of_model(model).type
    is_float = model.dtype in (torch.float32, torch.float64) and getattr(model, "hf_quantizer", None) is None
    return is_float and torch.get_float32_matmul_precision() == "highest" and not torch.is_autocast_enabled(kind)
