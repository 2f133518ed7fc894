"""Limits of a request: the name of the model, the length and tokens of a prompt, tools, and values of settings."""

import inspect
import math
from collections.abc import Iterator

from transformers import GenerationConfig, PreTrainedModel
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import Modality
from transformers.utils.chat_template_utils import _get_template_variables

from ..devices import free_memory
from .errors import Refusal
from .logprobs import Names
from .parameters import Parameters

# Settings of a generation config whose whole numbers are ids of tokens.
TOKENS = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id"),
    *("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"),
}
LONGEST_NGRAM = 1000  # tokens; transformers makes a list for each of them
LARGEST = 1e30  # logits times or divided by a larger number are not finite in float32


class Limits:
    """Limits that are checked before a prompt is tokenized."""

    def __init__(self, model: PreTrainedModel, processor, names: list[str]):
        self.names, self.model = names, model
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.token_names = Names(self.tokenizer, model.config.get_text_config(decoder=True).vocab_size)
        self.positions = positions_of(model)
        longest = max(map(len, self.tokenizer.get_vocab()))
        self.characters = None if self.positions is None else self.positions * longest
        self.reads_text_only = ModelManager.get_model_modality(model, processor=processor) == Modality.LLM
        # Clients may not set the method's own arguments: a `chat_template`, for example, would be a program of theirs.
        self.reserved = {*inspect.signature(processor.apply_chat_template).parameters} - {"documents"}
        self.takes_tools = takes_tools(processor)

    def check(self, request: Parameters) -> None:
        """Raises [`Refusal`] if it is clear before tokenization that the request cannot be served."""
        if request.model not in (None, *self.names):
            raise Refusal(f"This server has one model, {self.names[0]}; the request names {request.model}.", "model")
        if self.characters is not None and (count := request.characters()) > self.characters:
            raise Refusal(
                f"The prompt has {count} characters; the model's {self.positions} positions hold at most "
                f"{self.characters}.",
                status=413,
            )
        if self.reads_text_only and (kinds := request.media()):
            raise Refusal(f"The model reads text only; the messages have {', '.join(sorted(kinds))}.", "messages")
        if names := self.reserved.intersection(getattr(request, "chat_template_kwargs", None) or ()):
            raise Refusal(f"`chat_template_kwargs` may not name {', '.join(sorted(names))}.", "chat_template_kwargs")
        if not self.takes_tools and request.body().get("tools"):
            raise Refusal("The chat template of this model does not use `tools`; leave them out.", "tools")


def positions_of(model: PreTrainedModel) -> int | None:
    """Returns the number of positions of a model, or `None` if it has no limit."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def takes_tools(processor) -> bool:
    """Returns whether a chat template uses the tools that it is given. Without a Jinja template that is not known."""
    templates = getattr(processor, "chat_template", None)
    if not isinstance(templates, dict):
        templates = {"default": templates}
    return any(text is None or "tools" in _get_template_variables(text) for text in templates.values())


def check_prompt(model: PreTrainedModel, tokens: list[int]) -> None:
    """Raises [`Refusal`] if a prompt is empty, too long, or has a token that the model does not have."""
    positions = positions_of(model)
    if not tokens:
        raise Refusal("The prompt is empty; it must have at least one token.")
    if positions is not None and len(tokens) >= positions:
        raise Refusal(f"The prompt has {len(tokens)} tokens; the model takes fewer than {positions}.")
    _check_tokens(model, "prompt", tokens)


def check_rows(model: PreTrainedModel, count: int, positions: int) -> None:
    """Raises [`Refusal`] if the keys and values of several rows need more memory than is free."""
    config, free = model.config.get_text_config(decoder=True), free_memory(model.device)
    heads = getattr(config, "num_attention_heads", None) or 1
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    heads = getattr(config, "num_key_value_heads", None) or heads
    needed = 2 * count * positions * config.num_hidden_layers * heads * width * model.dtype.itemsize
    if count > 1 and free is not None and needed > free:
        raise Refusal(
            f"{count} choices of {positions} tokens need {needed / 2**30:.2f} GB of memory, and {free / 2**30:.2f} GB "
            "are free: ask for fewer choices in `n`, or for fewer tokens.",
            "n",
        )


def check_settings(model: PreTrainedModel, config: GenerationConfig, names: dict[str, str]) -> None:
    """
    Raises [`Refusal`] if a setting that differs from the model's own names a token that the model does not have, or has
    a number with which float32 cannot compute. `names` are those of settings that clients know by other names.
    """
    if (config.num_return_sequences or 1) > 1 or config.return_dict_in_generate:
        raise Refusal("`num_return_sequences` and `return_dict_in_generate` are not supported here.")
    if (config.num_beams or 1) > 1:
        raise Refusal("`num_beams` is not supported here; leave it out.", "num_beams")
    for setting, value in vars(config).items():
        if value is None or value == getattr(model.generation_config, setting, None):
            continue
        if setting == "prefill_chunk_size" and (type(value) is not int or value < 1):  # torch takes lists of sizes too
            raise Refusal("`prefill_chunk_size` takes a positive number of tokens.", setting)
        name, has_biases = names.get(setting, setting), setting == "sequence_bias"
        parts = list(_parts([*value.items()] if has_biases and isinstance(value, dict) else value))
        if setting in TOKENS:
            if any(type(part) not in ((int, float) if has_biases else (int,)) for part in parts):
                raise Refusal(f"`{name}` takes ids of tokens.", name)
            _check_tokens(model, name, [part for part in parts if type(part) is int])
        for number in parts:
            if type(number) not in (int, float):
                continue
            if setting.endswith("ngram_size") and number > LONGEST_NGRAM:
                raise Refusal(f"`{name}` is {number}; at most {LONGEST_NGRAM} are supported.", name)
            if not math.isfinite(number) or abs(number) > LARGEST or 0 < abs(number) < 1 / LARGEST:
                raise Refusal(
                    f"`{name}` is {number}: use 0, or a number of a size from {1 / LARGEST:g} to {LARGEST:g}.", name
                )


def _check_tokens(model: PreTrainedModel, name: str, tokens: list[int]) -> None:
    count = model.config.get_text_config(decoder=True).vocab_size
    if wrong := [token for token in tokens if not 0 <= token < count]:
        raise Refusal(f"`{name}` names token {wrong[0]}; the model has {count}.", name)


def _parts(value) -> Iterator:
    """Yields a value, or what a list and the lists in it have."""
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _parts(part)
    else:
        yield value
