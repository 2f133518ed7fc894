"""The user's entry points: `generate(..., ssd_config=...)`, `enable` and `generate`."""

import contextvars
import copy
import functools
import weakref
from typing import TypeVar

import torch
from transformers import GenerationMixin, PreTrainedModel, StoppingCriteriaList, StopStringCriteria

from ..cache.support import without_wrapper
from ..config import WITHOUT_DRAFT, SSDConfig
from ..distributed.assistant import DraftAssistant
from ..stats import SSDDecoderOnlyOutput
from ..versions import warn_if_untested
from .checks import check_arguments, check_assisted_options
from .loop import speculative_speculative_decoding
from .tokenizers import translation_for

Model = TypeVar("Model", bound=torch.nn.Module)  # a transformers model, or a `PeftModel` of one
BOUND = "bound"  # default of `ssd_config`: the settings that the model was enabled with
_bound = weakref.WeakKeyDictionary()  # drafts, settings and tokenizers of enabled models
_tokenizer = contextvars.ContextVar("tokenizer", default=None)  # of the call that `heal_tokens` works for
_is_healing = contextvars.ContextVar("is_healing", default=False)


class SSDGenerationMixin:
    """Adds `assistant_model` with `ssd_config` to a model's `generate()`. See [`enable`]."""

    def generate(
        self,
        inputs=None,
        generation_config=None,
        logits_processor=None,
        stopping_criteria=None,
        prefix_allowed_tokens_fn=None,
        synced_gpus=None,
        assistant_model=None,
        streamer=None,
        *,
        ssd_config: SSDConfig | dict | str | None = BOUND,
        **kwargs,
    ):
        """
        As `GenerationMixin.generate`, but with `ssd_config` by speculative speculative decoding.

        Args:
            assistant_model (`PreTrainedModel`, [`DraftAssistant`], `str` or `os.PathLike`, *optional*): The draft. A
                model is handed to a worker process in the first call, and later calls reuse the worker. Until the
                worker is ready, the draft runs in this process, in turn with the target. A folder or hub id is loaded
                only by the worker; until the worker is ready, decoding is plain. A draft that reads hidden states of
                its target is loaded in this process, for this target. Drafters that work in the target's process (see
                [`SSDConfig`]) take no draft.
            ssd_config ([`SSDConfig`] or `dict`, *optional*): The settings. By default the settings and the draft that
                were given to [`enable`]. Without those, and with `ssd_config=None`, this is transformers' own method.
            inputs, generation_config, logits_processor, stopping_criteria, streamer, kwargs: As in transformers. With
                `tokenizer` and `assistant_tokenizer`, which may differ, the draft proposes the tokens that both have.

        Returns:
            The return value of transformers' `generate()`. With `return_dict_in_generate=True` and `ssd_config` it is
            an [`SSDDecoderOnlyOutput`], which carries `ssd_stats`.

        Raises:
            `ValueError`, `TypeError`: the arguments cannot work; raised before any work starts.
            [`DraftError`]: the draft did not start, or failed, and `on_draft_failure="raise"`.
        """
        kwargs |= {"inputs": inputs, "generation_config": generation_config, "logits_processor": logits_processor}
        kwargs |= {"stopping_criteria": stopping_criteria, "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn}
        kwargs |= {"synced_gpus": synced_gpus, "streamer": streamer}
        draft, settings, tokenizers = bound_to(self)
        is_bound = isinstance(ssd_config, str) and ssd_config == BOUND
        if is_bound:
            is_theirs = kwargs.get("custom_generate") not in (None, generate)  # another way to generate
            ssd_config = None if is_theirs or _is_healing.get() else settings
        if ssd_config is not None and assistant_model is None and not _takes_no_draft(ssd_config):
            assistant_model = draft
            kwargs |= {name: one for name, one in tokenizers.items() if kwargs.get(name) is None}
        if kwargs.get("custom_generate") is generate:  # the function below, which does the same as this method
            kwargs["custom_generate"], ssd_config = None, ssd_config or SSDConfig()
        if ssd_config is not None and kwargs.get("custom_generate") is None:
            kwargs.pop("custom_generate", None)
            return _generate(super().generate, self, assistant_model, ssd_config, is_bound=is_bound, **kwargs)
        if ssd_config is not None:
            kwargs["ssd_config"] = ssd_config  # for the user's own decoding method
        elif isinstance(assistant_model, DraftAssistant):
            raise ValueError("This `assistant_model` drafts ahead; pass `ssd_config=hf_ssd.SSDConfig()` as well.")
        return super().generate(assistant_model=assistant_model, **kwargs)

    def heal_tokens(self, input_ids, tokenizer=None):
        """As in transformers, with the call's tokenizer, which a custom decoding method is not given otherwise."""
        if tokenizer is None and not _is_healing.get():
            tokenizer = _tokenizer.get()
        before = _is_healing.set(True)  # healing generates a token of each row without the draft
        try:
            return super().heal_tokens(input_ids, tokenizer)
        finally:
            _is_healing.reset(before)

    def __reduce_ex__(self, protocol):
        """Lets `pickle` and `copy` name the class from before [`enable`], which another process can import."""
        kind = vars(type(self)).get("_ssd_kind")
        if kind is None:  # a class that was written with this mixin
            return super().__reduce_ex__(protocol)
        _, _, *state = super().__reduce_ex__(max(2, protocol))
        return (_blank_model, (kind,), *state)


def generate(
    model: torch.nn.Module, inputs=None, *, assistant_model=None, ssd_config: SSDConfig | dict | None = None, **kwargs
) -> SSDDecoderOnlyOutput | torch.LongTensor:
    """
    Speculative speculative decoding with a model that was not passed to [`enable`]. The `generate()` of an enabled
    model also takes this function as `custom_generate`. The arguments are those of [`SSDGenerationMixin.generate`];
    `ssd_config` defaults to `SSDConfig()`.
    """
    if assistant_model is None and not _takes_no_draft(ssd_config):
        raise ValueError(
            "hf_ssd.generate needs an `assistant_model`, which transformers does not pass on to a function that is "
            "given as `custom_generate`: call hf_ssd.generate(model, **inputs, assistant_model=...) itself, or "
            "hf_ssd.enable(model) before."
        )
    wrapper, model = model, without_wrapper(model)
    configs = (kwargs.get("generation_config") or model.generation_config, model.generation_config)
    heals = [kwargs.get("token_healing"), *(config.token_healing for config in configs)]
    if not isinstance(model, SSDGenerationMixin) and next((one for one in heals if one is not None), False):
        raise ValueError("`token_healing` needs a model that was passed to hf_ssd.enable(); call its own generate().")
    # The model's own method. It has begun already where transformers calls this function of a custom_generate folder,
    # with all of its own arguments.
    is_called_by_it = "negative_prompt_ids" in kwargs
    method, its = (GenerationMixin, model) if is_called_by_it else (type(wrapper), wrapper)
    plain = functools.partial(method.generate, its, *(() if inputs is None else (inputs,)))
    return _generate(plain, model, assistant_model, ssd_config or SSDConfig(), **kwargs)


def enable(
    model: Model,
    assistant_model=None,
    ssd_config: SSDConfig | dict | None = None,
    tokenizer=None,
    assistant_tokenizer=None,
) -> Model:
    """
    Adds the `ssd_config` argument to the `generate()` of a model instance, and returns the model. Nothing else about
    the model changes: its class keeps its name, and it saves and loads as before.

    With a draft, every call of `generate()` speculates, also the calls of a pipeline, a server or an evaluation.
    Arguments of a call win: another `assistant_model` or `ssd_config`, or `ssd_config=None` for a call without a draft.

    Args:
        model (`PreTrainedModel`): A decoder-only model, or a `PeftModel` of one.
        assistant_model (`PreTrainedModel`, [`DraftAssistant`], `str` or `os.PathLike`, *optional*): The draft of all
            calls. Without it, a draft that was given before is forgotten.
        ssd_config ([`SSDConfig`] or `dict`, *optional*): Settings of all calls, by default `SSDConfig()`.
        tokenizer, assistant_tokenizer (`PreTrainedTokenizerBase`, *optional*): The tokenizers of the model and of the
            draft, for all calls with this draft, if they differ. See [`SSDGenerationMixin.generate`].

    Raises:
        `TypeError`: `model` is not a transformers model that generates.
        `ValueError`: the model's adapter is not part of the model, as in prompt tuning, or the two models cannot work
            together.
    """
    inner = without_wrapper(model)
    if not isinstance(inner, PreTrainedModel) or not isinstance(inner, GenerationMixin):
        raise TypeError(f"hf_ssd.enable takes a transformers model with generate(), not a {type(model).__name__}.")
    if not isinstance(inner, SSDGenerationMixin):
        inner.__class__ = _enabled_class(type(inner))
    _bound.pop(inner, None)
    if assistant_model is not None or ssd_config is not None:
        config = settings_of(ssd_config or SSDConfig())
        resolved = check_arguments(inner, assistant_model, config, synced_gpus=None)
        tokenizers = {"tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer}
        tokenizers = {name: one for name, one in tokenizers.items() if one is not None}
        if tokenizers:
            translation_for(inner, resolved, **tokenizers)
        _bound[inner] = assistant_model, config, tokenizers
    elif tokenizer is not None or assistant_tokenizer is not None:
        raise ValueError("Tokenizers are for a draft: pass `assistant_model=...` to hf_ssd.enable() as well.")
    return model


def disable(model: Model) -> Model:
    """
    Undoes [`enable`]: the model instance has its own class again, and its draft is forgotten. Returns the model. A
    worker that calls have started for the draft is ended by [`close`].

    Args:
        model (`PreTrainedModel`): A model, or a `PeftModel` of one. If it was not enabled, nothing happens.
    """
    inner = without_wrapper(model)
    kind = vars(type(inner)).get("_ssd_kind")
    if kind is not None:
        inner.__class__ = kind
    if isinstance(inner, PreTrainedModel):
        _bound.pop(inner, None)
    return model


def bound_to(model: PreTrainedModel) -> tuple:
    """Returns the draft, settings and tokenizers that a model was enabled with."""
    return _bound.get(model, (None, None, {}))


def _takes_no_draft(ssd_config) -> bool:
    return getattr(settings_of(ssd_config), "drafter", None) in WITHOUT_DRAFT


def settings_of(ssd_config: SSDConfig | dict | None) -> SSDConfig | None:
    return SSDConfig.from_dict(ssd_config) if isinstance(ssd_config, dict) else ssd_config


@functools.cache
def _enabled_class(kind: type) -> type:
    """Returns the class that models of this kind get from [`enable`]."""
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (SSDGenerationMixin, kind), {**names, "_ssd_kind": kind})


def _blank_model(kind: type) -> PreTrainedModel:
    """Returns an enabled model without contents, for `pickle` and `copy` to fill."""
    enabled = _enabled_class(kind)
    return enabled.__new__(enabled)


def _generate(plain, model, assistant_model, ssd_config, streamer=None, synced_gpus=None, is_bound=False, **kwargs):
    warn_if_untested()
    ssd_config = settings_of(ssd_config)
    check_assisted_options(model, kwargs.get("generation_config"), kwargs)
    resolved = check_arguments(model, assistant_model, ssd_config, synced_gpus)
    translation = translation_for(model, resolved, kwargs.get("tokenizer"), kwargs.pop("assistant_tokenizer", None))
    tokenizer = kwargs.get("tokenizer")
    move_stop_strings(model, kwargs)
    # transformers passes neither the draft nor the streamer to a custom decoding method, so they are bound here.
    decoding_method = functools.partial(
        speculative_speculative_decoding,
        resolved=resolved,
        ssd_config=ssd_config,
        streamer=streamer,
        translation=translation,
        is_bound=is_bound,
    )
    before = _tokenizer.set(tokenizer)
    try:
        return plain(custom_generate=decoding_method, streamer=streamer, **kwargs)
    finally:
        _tokenizer.reset(before)


def move_stop_strings(model, kwargs: dict) -> None:
    """Turns `stop_strings` into a criterion; transformers passes no tokenizer on to a custom decoding method."""
    if model.generation_config.stop_strings is not None:
        raise ValueError(
            "The model's own generation config has `stop_strings`, from where `ssd_config` cannot take them; pass them "
            "to generate(), and set model.generation_config.stop_strings = None."
        )
    generation_config = kwargs.get("generation_config")
    in_config = None if generation_config is None else generation_config.stop_strings
    stop_strings = kwargs.pop("stop_strings", None) or in_config
    tokenizer = kwargs.pop("tokenizer", None)
    if stop_strings is None:
        return
    if tokenizer is None:
        raise ValueError("`stop_strings` needs the model's tokenizer: pass `tokenizer=...` to generate() as well.")
    if in_config is not None:
        kwargs["generation_config"] = copy.deepcopy(generation_config)
        kwargs["generation_config"].stop_strings = None
    criteria = [*(kwargs.get("stopping_criteria") or []), StopStringCriteria(tokenizer, stop_strings)]
    kwargs["stopping_criteria"] = StoppingCriteriaList(criteria)
