"""Checks of the arguments and models of a call, made before any work starts."""

import inspect
import os

import torch
import torch.distributed as dist
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation import (
    GenerationMode,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import utils as generation_utils
from transformers.generation.logits_process import DiaEOSDelayPatternLogitsProcessor

from ..cache.attached import attached_to
from ..cache.cache_name import CACHE
from ..cache.compiled import is_compiled
from ..cache.support import (
    attention_layout,
    check_own_decoding,
    is_flash_attention,
    last_column_limit,
    rope_that_changes,
)
from ..config import LONGEST_LOOKAHEAD, WITHOUT_DRAFT, SSDConfig
from ..distributed.assistant import DraftAssistant
from ..distributed.roles import check_heads
from ..drafting.heads.loading import OF_TARGET
from ..drafting.resolver import ResolvedDraft, resolve
from ..noise import check_fits
from ..planning.fixed_plan import nodes_of
from ..versions import check_internals
from .proposers.custom import check_proposer
from .settings import Settings

# Tensor inputs that transformers feeds to the model once or never, or that verification continues by itself.
KNOWN_INPUTS = {"labels"}
KNOWN_INPUTS |= {"attention_mask", "position_ids", "cache_position", "inputs_embeds"}
KNOWN_INPUTS |= {"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}
KNOWN_INPUTS |= set(getattr(generation_utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()))

# Options that make transformers draft by itself, and the alternative that the message names.
LOOKUPS = {
    "prompt_lookup_num_tokens": '; SSDConfig(drafter="ngram") looks the prompt up, without an `assistant_model`',
    "assistant_early_exit": ": the draft is `assistant_model`",
}
ASSISTED_OPTIONS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")

OF_A_ROW = {CACHE, "attention_mask", "position_ids", "use_cache", "logits_to_keep"}  # inputs of a request

ROOM = 2 * LONGEST_LOOKAHEAD + 2  # columns beyond `max_length`, for drafted tokens that are not accepted

# transformers' processors whose result depends on earlier calls. `WatermarkLogitsProcessor` is not in the list, because
# it seeds its generator in each call.
PROCESSORS_WITH_MEMORY = (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    DiaEOSDelayPatternLogitsProcessor,
)


def check_arguments(model, assistant_model, ssd_config, synced_gpus) -> ResolvedDraft:
    """Returns the draft, or raises `TypeError` or `ValueError` if arguments or models cannot work together."""
    if not isinstance(ssd_config, SSDConfig):
        raise TypeError(f"`ssd_config` must be an hf_ssd.SSDConfig or a dict, but is a {type(ssd_config).__name__}.")
    takes_none = ssd_config.drafter in WITHOUT_DRAFT
    if isinstance(assistant_model, DraftAssistant) and assistant_model.process != os.getpid():
        raise ValueError(
            "This draft assistant belongs to the process that this one was forked from; call hf_ssd.launch_draft() "
            "after forking."
        )
    if not isinstance(ssd_config.fallback, str):
        check_proposer(ssd_config.fallback)
    if _is_synced(model) if synced_gpus is None else synced_gpus:
        raise ValueError("`synced_gpus` (FSDP, DeepSpeed ZeRO-3) is not supported with `ssd_config`.")
    tp_size = getattr(model, "_tp_size", None) or 1
    check_heads(model.config, tp_size)
    if tp_size > 1 and takes_none:
        raise ValueError(
            f'SSDConfig(drafter="{ssd_config.drafter}") works for a target in one process, and {tp_size} ranks share '
            "this target; pass the draft that hf_ssd.distributed.init_roles() gives instead."
        )
    if tp_size > 1 and not (isinstance(assistant_model, DraftAssistant) and assistant_model.ranks.size == tp_size):
        raise ValueError(
            f"The target is shared by {tp_size} ranks, and needs the draft that hf_ssd.distributed.init_roles() gives: "
            "pass `assistant_model=roles.draft` on every rank."
        )
    if tp_size > 1 and isinstance(ssd_config.fallback, str) and ssd_config.fallback in OF_TARGET:
        raise ValueError(
            f'SSDConfig(fallback="{ssd_config.fallback}") reads hidden states of the target, and several ranks share '
            "this target; leave it out."
        )
    check_own_decoding(model)
    layout = attention_layout(model)
    if (layout.recurrent or layout.indexed) and (tp_size > 1 or is_flash_attention(model)):
        layers = "recurrent layers" if layout.recurrent else "sparse attention"
        raise ValueError(
            f"{type(model).__name__} has {layers}, which is not supported where several ranks hold the target "
            'or with flash attention; load it in one process with attn_implementation="sdpa".'
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{type(model).__name__} takes no `position_ids`, which verification needs.")
    if takes_none and assistant_model is not None:
        raise ValueError(
            f'SSDConfig(drafter="{ssd_config.drafter}") uses no draft model; leave out `assistant_model`, or '
            f'`drafter="{ssd_config.drafter}"`.'
        )
    if assistant_model is None and not takes_none and ssd_config.lookahead != 0:
        raise ValueError(
            "`ssd_config` needs an `assistant_model`: the draft model, its folder or hub id, or what "
            'hf_ssd.launch_draft() gives. Without a draft, SSDConfig(drafter="ngram") looks the prompt up.'
        )
    return resolve(assistant_model, model, ssd_config)


def check_assisted_options(model, generation_config: GenerationConfig | None, kwargs: dict) -> None:
    """Raises `ValueError` if a call sets an option of transformers' own assisted generation."""
    # A pipeline of transformers 5.17 writes the library's defaults into its own options.
    defaults = getattr(GenerationConfig, "_get_default_generation_params", dict)()
    for name in ASSISTED_OPTIONS:
        of_config, of_model = (getattr(config, name, None) for config in (generation_config, model.generation_config))
        if kwargs.get(name) is not None or of_config not in (None, of_model, defaults.get(name)):
            raise ValueError(
                f"`{name}` is a setting of transformers' assisted generation; leave it out with `ssd_config`, where "
                "SSDConfig(lookahead=...) says how many tokens are drafted."
            )


def check_generation(model, input_ids, settings: Settings, model_kwargs: dict, draft: PreTrainedModel | None) -> None:
    """Raises `ValueError` if a prepared option or input cannot be combined with `ssd_config`."""
    generation_config, max_length = settings.options, settings.max_length
    without, hint = "", "leave `ssd_config` out"
    if settings.is_bound:
        hint = "pass `ssd_config=None` in this call"
        without = f"; {hint} to decode without the draft"
    if len(input_ids) == 0:
        raise ValueError("`input_ids` has no rows; give at least one prompt.")
    for name, advice in LOOKUPS.items():
        if getattr(generation_config, name, None) is not None:
            raise ValueError(f"`ssd_config` cannot be combined with `{name}`; remove it{advice}{without}.")
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"`ssd_config` works with greedy decoding and sampling, but these options ask for {mode.value}; remove "
            f"`num_beams`, `penalty_alpha`, `constraints` and the like, or {hint}."
        )
    ensemble_weight = getattr(generation_config, "assistant_ensemble_weight", None)
    of_model = ", which is in the model's own config; pass `use_cache=True` to generate(), or set it in the config"
    of_model = of_model if model.generation_config.use_cache is False else ""
    position_ids = model_kwargs.get("position_ids")  # (kinds, batch_size, columns) in multimodal models
    are_of_text = position_ids is None or position_ids.ndim < 3 or bool((position_ids == position_ids[:1]).all())
    refused = {
        f"use_cache=False{of_model}": not generation_config.use_cache,
        "assistant_ensemble_weight (it changes the output distribution)": ensemble_weight is not None,
        "guidance_scale": generation_config.guidance_scale not in (None, 1),
        "output_attentions": generation_config.output_attentions,
        "output_hidden_states": generation_config.output_hidden_states,
        "inputs_embeds (the draft needs `input_ids`)": model_kwargs.get("inputs_embeds") is not None,
        "tokens that have several different positions each, as those of images": not are_of_text,
    }
    for processor in settings.processors:
        name = f"{type(processor).__name__} (it remembers earlier calls, and counts on one for each token)"
        refused[name] = isinstance(processor, PROCESSORS_WITH_MEMORY)
    for name, value in model_kwargs.items():
        is_unknown = isinstance(value, torch.Tensor) and name not in KNOWN_INPUTS
        refused[f"{name} (an input that plain generation feeds with every token)"] = is_unknown
    for name, is_found in refused.items():
        if is_found:
            raise ValueError(f"`ssd_config` cannot be combined with {name}{without}.")
    check_internals(model, CACHE, model_kwargs)
    cache = model_kwargs.get(CACHE)
    if generation_config.cache_implementation not in (None, "dynamic") or type(cache) is not DynamicCache:
        kind = generation_config.cache_implementation or type(cache).__name__
        raise ValueError(
            f"`ssd_config` works with a DynamicCache, which can be rolled back; remove the {kind} cache{without}."
        )
    layout = attention_layout(model)
    if (layout.recurrent or layout.indexed) and not cache.layers:
        raise ValueError(
            f"`DynamicCache()` has no layers of the kinds that {type(model).__name__} needs; use "
            f"`DynamicCache(config=model.config)`, or leave `{CACHE}` out."
        )
    if input_ids.shape[1] == 0:
        raise ValueError("`input_ids` is empty; give at least one token.")
    _check_rope(model, input_ids, max_length, model_kwargs)
    _check_columns(model, max_length, model_kwargs, max(ROOM, 2 * nodes_of(settings.config) + 2))
    if generation_config.do_sample:
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        check_fits(len(input_ids), (max_length or 0) + ROOM, vocab_size)
    if is_flash_attention(model) and (len(input_ids) > 1 or model_kwargs.get("attention_mask") is not None):
        raise ValueError(
            "Flash attention reads no 4D masks, which batches and padding need; load the target with "
            'attn_implementation="sdpa", or generate one prompt at a time.'
        )
    if draft is not None and not settings.config.asynchronous and is_flash_attention(draft) and len(input_ids) > 1:
        raise ValueError(
            "Flash attention reads no 4D masks, which batches need; load the draft with "
            'attn_implementation="sdpa", or leave out `asynchronous=False`: a worker switches by itself.'
        )


def check_joining(model: PreTrainedModel) -> None:
    """Raises `ValueError` for models whose rows cannot join."""
    for is_found, reason in (
        (is_compiled(model), "a compiled target"),
        (is_flash_attention(model), 'flash attention, which reads no 4D masks; load the target with "sdpa"'),
        (attached_to(model).may_depend_on_rows, "hooks that may depend on the rows of a batch"),
        ((getattr(model, "_tp_size", None) or 1) > 1, "a target that several ranks share"),
    ):
        if is_found:
            raise ValueError(
                f"Requests cannot join a running batch of {reason}; call generate() for each batch instead."
            )


def check_row(model: PreTrainedModel, input_ids: torch.LongTensor, settings: Settings, model_kwargs: dict) -> None:
    """Raises `ValueError` for a request that is no row of a running batch."""
    if len(input_ids) != 1:
        raise ValueError(f"A request has one prompt, and not {len(input_ids)}; add a request for each.")
    if model_kwargs[CACHE].get_seq_length() or getattr(model_kwargs[CACHE], "_is_user_defined", False):
        raise ValueError(f"A request cannot bring a cache; leave `{CACHE}` out.")
    for name in model_kwargs.keys() - OF_A_ROW:
        if isinstance(model_kwargs[name], torch.Tensor) and model_kwargs[name].any():  # all tokens are of type 0
            raise ValueError(f"A request cannot have `{name}`; leave it out, or call generate().")
    changes = rope_that_changes(model)
    if changes is not None and (settings.max_length is None or settings.max_length > changes[1]):
        raise ValueError(
            f"{type(model).__name__} has a rotary embedding that changes after {changes[1]} tokens, and rows of a "
            f"running batch differ in length; set `max_length={changes[1]}` or less."
        )


def _is_synced(model) -> bool:
    """Returns the value that transformers gives `synced_gpus` if the call does not set it."""
    is_shared = generation_utils.is_deepspeed_zero3_enabled() or generation_utils.is_fsdp_managed_module(model)
    return is_shared and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _check_rope(model, input_ids, max_length: int | None, model_kwargs: dict) -> None:
    """Raises `ValueError` for lengths at which the frequencies of a rotary embedding would change during generation."""
    # Plain generation then computes all keys anew, or keeps earlier ones, and rows would get there at different times.
    changes, position_ids = rope_that_changes(model), model_kwargs.get("position_ids")
    if changes is None:
        return
    kind, unchanged = changes
    before, length = model_kwargs[CACHE].get_seq_length(), input_ids.shape[1]
    last = torch.tensor([before + length - 1]) if position_ids is None else position_ids[..., -1]
    stays = max_length is not None and int(last.max()) + 1 + max_length - length <= unchanged
    has_changed = kind == "longrope" and int(last.min()) >= unchanged and not 0 < before <= unchanged
    if stays or has_changed:
        return
    raise ValueError(
        f"{type(model).__name__} has a rotary embedding (`{kind}`) that changes when the text becomes longer than "
        f"{unchanged} tokens, which `ssd_config` cannot follow; set `max_length={unchanged}` or less"
        + (", or give prompts that are longer than that." if kind == "longrope" else ".")
    )


def _check_columns(model, max_length: int | None, model_kwargs: dict, room: int) -> None:
    """Raises `ValueError` for lengths at which a model scales attention by the number of columns in its cache."""
    limit = last_column_limit(model)
    before = model_kwargs[CACHE].get_seq_length()
    if limit is not None and (max_length is None or before + max_length + room > limit):
        raise ValueError(
            f"{type(model).__name__} scales attention by the number of columns in its cache from {limit} columns on, "
            f"which `ssd_config` cannot follow; set `max_length={limit - room}` or less, padding included."
        )
