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
    """A model with its names and tokenizer, and what a request may ask of it."""

    def __init__(self, model: PreTrainedModel, processor, names: list[str]):
        self.names, self.model, self.config = names, model, model.config.get_text_config(decoder=True)
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.token_names = Names(self.tokenizer, self.config.vocab_size)
        self.positions = getattr(self.config, "max_position_embeddings", None)  # `None`: any number
        longest = max(map(len, self.tokenizer.get_vocab()))
        self.characters = None if self.positions is None else self.positions * longest
        self.reads_text_only = ModelManager.get_model_modality(model, processor=processor) == Modality.LLM
        # Clients may not set the method's own arguments: a `chat_template`, for example, would be a program of theirs.
        self.reserved = {*inspect.signature(processor.apply_chat_template).parameters} - {"documents"}
        templates = getattr(processor, "chat_template", None)  # `None`: it is not known whether it uses tools
        templates = templates.values() if isinstance(templates, dict) else [templates]
        self.takes_tools = any(text is None or "tools" in _get_template_variables(text) for text in templates)

    def check(self, request: Parameters) -> None:
        """Raises [`Refusal`] if it is clear before tokenization that the request cannot be served."""
        if request.model not in (None, *self.names):
            raise Refusal(f"This server has one model, {self.names[0]}; the request names {request.model}.", "model")
        if self.characters is not None and (count := request.characters()) > self.characters:
            most = f"the model's {self.positions} positions hold at most {self.characters}"
            raise Refusal(f"The prompt has {count} characters; {most}.", status=413)
        if request.get("top_logprobs") and not request.get("logprobs"):
            raise Refusal("`top_logprobs` needs `logprobs` to be true.", "top_logprobs")
        if self.reads_text_only and (kinds := request.media()):
            raise Refusal(f"The model reads text only; the messages have {', '.join(sorted(kinds))}.", "messages")
        if names := self.reserved.intersection(getattr(request, "chat_template_kwargs", None) or ()):
            raise Refusal(f"`chat_template_kwargs` may not name {', '.join(sorted(names))}.", "chat_template_kwargs")
        if not self.takes_tools and request.body().get("tools"):
            raise Refusal("The chat template of this model does not use `tools`; leave them out.", "tools")

    def check_prompt(self, tokens: list[int]) -> None:
        """Raises [`Refusal`] if a prompt is empty, too long, or has a token that the model does not have."""
        if not tokens:
            raise Refusal("The prompt is empty; it must have at least one token.")
        if self.positions is not None and len(tokens) >= self.positions:
            raise Refusal(f"The prompt has {len(tokens)} tokens; the model takes fewer than {self.positions}.")
        self._check_tokens("prompt", tokens)

    def check_rows(self, count: int, positions: int) -> None:
        """Raises [`Refusal`] if the keys and values of several rows need more memory than is free."""
        config, free = self.config, free_memory(self.model.device)
        heads = getattr(config, "num_attention_heads", None) or 1
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        heads = getattr(config, "num_key_value_heads", None) or heads
        needed = 2 * count * positions * config.num_hidden_layers * heads * width * self.model.dtype.itemsize
        if count > 1 and free is not None and needed > free:
            sizes = f"{needed / 2**30:.2f} GB of memory, and {free / 2**30:.2f} GB are free"
            more = "ask for fewer choices in `n`, or for fewer tokens"
            raise Refusal(f"{count} choices of {positions} tokens need {sizes}: {more}.", "n")

    def check_settings(self, config: GenerationConfig, asked: Parameters) -> None:
        """Raises [`Refusal`] if a setting that is not the model's own has a wrong token or too large a number."""
        if (config.num_return_sequences or 1) > 1 or config.return_dict_in_generate:
            raise Refusal("`num_return_sequences` and `return_dict_in_generate` are not supported here.")
        if (config.num_beams or 1) > 1:
            raise Refusal("`num_beams` is not supported here; leave it out.", "num_beams")
        for setting, value in vars(config).items():
            if value is None or value == getattr(self.model.generation_config, setting, None):
                continue
            if setting == "prefill_chunk_size" and not (type(value) is int and value > 0):  # torch takes lists too
                raise Refusal("`prefill_chunk_size` takes a positive number of tokens.", setting)
            has_biases = setting == "sequence_bias"
            name = "logit_bias" if has_biases and asked.get("logit_bias") else setting
            parts = list(_parts([*value.items()] if has_biases and isinstance(value, dict) else value))
            if setting in TOKENS:
                if any(type(part) not in ((int, float) if has_biases else (int,)) for part in parts):
                    raise Refusal(f"`{name}` takes ids of tokens.", name)
                self._check_tokens(name, [part for part in parts if type(part) is int])
            for number in parts:
                if type(number) not in (int, float):
                    continue
                if setting.endswith("ngram_size") and number > LONGEST_NGRAM:
                    raise Refusal(f"`{name}` is {number}; at most {LONGEST_NGRAM} are supported.", name)
                if not math.isfinite(number) or abs(number) > LARGEST or 0 < abs(number) < 1 / LARGEST:
                    sizes = f"a number of a size from {1 / LARGEST:g} to {LARGEST:g}"
                    raise Refusal(f"`{name}` is {number}: use 0, or {sizes}.", name)

    def _check_tokens(self, name: str, tokens: list[int]) -> None:
        count = self.config.vocab_size
        if wrong := [token for token in tokens if not 0 <= token < count]:
            raise Refusal(f"`{name}` names token {wrong[0]}; the model has {count}.", name)


def _parts(value) -> Iterator:
    """Yields a value, or what a list and the lists in it have."""
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _parts(part)
    else:
        yield value
