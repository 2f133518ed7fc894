"""The parameters of OpenAI's requests: their allowed values, and whether this server supports them."""

import functools
import json
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from .errors import Refusal

TEXTS = ("text", "input_text", "output_text")  # types of a message's parts
LARGEST = 2**31 - 1
TUNING = {"safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
LOGPROBS = "`true` in chats, from 0 to 5 likely tokens in completions; see [below](#log-probabilities)"
TOOLS = "functions, also [`strict`](#structured-output) ones; refused if the model's chat template does not use them"
TOOL_CHOICE = '"auto", or "none", which leaves the tools out'
STRUCTURED = "text, `json_object` or `json_schema`, see [below](#structured-output)"


def done(about: str, **limits) -> Any:
    """Returns the field of a parameter that transformers' handlers support."""
    return Field(None, description=about, **limits)


ours = functools.partial(done, exclude=True)  # a parameter that transformers' handlers do not get


def _is_an_object(text: str) -> str:
    if not isinstance(json.loads(text), dict):
        raise ValueError("is no JSON object")
    return text


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Open(BaseModel):
    """Allows fields beside those that are checked here, because a chat template may read them."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Part(Open):
    type: str
    text: str | None = None

    @model_validator(mode="after")
    def has_its_text(self):
        if self.type in TEXTS and self.text is None:
            raise ValueError(f"a part of type {self.type} needs its text")
        return self


class Function(Open):
    name: str


class CalledFunction(Function):
    arguments: Annotated[str, AfterValidator(_is_an_object)] | dict


class ToolCall(Open):
    function: CalledFunction


class Item(Open):
    """An item in the input of `/v1/responses`: a message, a part of a message, or a tool's call or output."""

    type: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None


class Message(Item):
    role: str
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def without_what_is_empty(cls, message):
        """Removes empty lists: to some versions of transformers a message with `tool_calls` has no text."""
        if not isinstance(message, dict):
            return message
        return {name: value for name, value in message.items() if value != []}


class FlatTool(Open):
    type: Literal["function"]


class Tool(FlatTool):
    function: Function


class Schema(Strict):
    name: str | None = None
    description: str | None = None
    of_json: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(Schema):
    """The format of an answer of `/v1/responses`, with its schema."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Strict):
    format: TextFormat | None = None


class ResponseFormat(Strict):
    """The format of an answer of `/v1/chat/completions`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


Stop = Annotated[str, Field(min_length=1, max_length=256)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Ids = Annotated[list[int], Field(min_length=1)]
Prompts = Annotated[list[str] | list[Ids], Field(min_length=1, max_length=2048)]


class Parameters(Strict):
    """Parameters of all addresses. `refused` maps each unsupported parameter to the value that asks for nothing."""

    refused: ClassVar[dict[str, Any]] = {}
    no_effect: ClassVar[set[str]] = {"user"}

    model: str | None = done("as `/v1/models` names it, or left out")
    temperature: float | None = done("0, which is greedy, or from 1e-30 to 2, which samples", ge=0, le=2)
    top_p: float | None = done("from 0 to 1; one below 1 samples, unless the temperature is 0", ge=0, le=1)
    seed: int | None = ours("see [below](#what-a-seed-repeats)", ge=-(2**63), lt=2**64)
    stream: bool | None = done("server-sent events, a round at a time")
    stream_options: dict[str, bool] | None = done("the last chunk has the usage in any case")
    generation_config: Annotated[str, AfterValidator(_is_an_object)] | None = done(
        "transformers' own: the JSON of a `GenerationConfig`, which takes the place of the model's"
    )

    @model_validator(mode="before")
    @classmethod
    def without_what_is_not_done(cls, body):
        """Removes unsupported parameters, and raises [`Refusal`] if the value of any of them asks for something."""
        if not isinstance(body, dict):
            return body
        for name, nothing in cls.refused.items():
            if body.get(name) not in (None, nothing):
                but = "" if nothing is None else f", except as {json.dumps(nothing)}"
                raise Refusal(f"`{name}` is not supported{but}.", name)
        return {name: value for name, value in body.items() if name not in {*cls.refused, *cls.no_effect}}

    def body(self) -> dict:
        """Returns the request as transformers' handlers read it, as one for a stream with what they support."""
        body = {**self.model_dump(exclude_unset=True, exclude_none=True), "stream": True}
        if self.get("tool_choice") == "none":
            body.pop("tools", None)
        if "max_completion_tokens" in body:  # transformers 5.17 reads the other name alone
            body["max_tokens"] = body.pop("max_completion_tokens")
        return {name: value for name, value in body.items() if value != []}

    def get(self, name: str, otherwise=None) -> Any:
        """Returns the value of a parameter, where it has none or the address has no such parameter another one."""
        value = getattr(self, name, None)
        return otherwise if value is None else value

    def settings(self) -> dict:
        """Returns the fields of the generation config that transformers' handlers do not set."""
        settings = {}
        if self.temperature != 0 and (self.temperature or self.get("top_p", 1) < 1):
            settings["do_sample"] = True
        if bias := self.get("logit_bias"):
            settings["sequence_bias"] = {(int(token),): float(value) for token, value in bias.items()}
        return settings

    def stops(self) -> list[str]:
        """Returns the strings before which the text ends."""
        stop = self.get("stop", [])
        return [stop] if isinstance(stop, str) else stop

    def likely(self) -> int | None:
        """Returns how many likely tokens to name beside each token, or `None` if no log-probabilities are wanted."""
        wanted = self.get("logprobs")
        if isinstance(wanted, bool):  # of a chat
            return self.get("top_logprobs", 0) if wanted else None
        return wanted

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts, each a text or its tokens, of a request that is not a chat."""
        return []

    def characters(self) -> int:
        """Returns the number of characters to tokenize, of the longest prompt if there are several."""
        parts = [self.get(name) for name in ("messages", "input", "instructions")]
        return sum(map(_characters, parts)) + max(map(_characters, self.prompts()), default=0)

    def media(self) -> set[str]:
        """Returns the types of those parts of the messages that are not text."""
        kinds = set()
        for item in self.get("messages") or self.get("input", ()):
            if isinstance(item, Item) and isinstance(item.content, list):
                kinds |= {part.type for part in item.content}
            elif isinstance(item, Item) and item.role is None and (item.type or "").startswith("input_"):
                kinds.add(item.type)  # a part that stands by itself
        return kinds.difference(TEXTS)


class Generation(Parameters):
    """Parameters of both addresses of completions."""

    max_tokens: int | None = done("at least 1; a text ends where the model's positions do", ge=1, le=LARGEST)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = ours(
        "a text, or up to 16, before which the answer ends; no empty one"
    )
    n: int | None = ours("from 1 to 8 choices, of which sampled ones differ", ge=1, le=8)
    frequency_penalty: Penalty | None = ours("from -2 to 2, for each time that the answer has a token")
    presence_penalty: Penalty | None = ours("from -2 to 2, for each token that the answer has")
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None = (
        ours("from -100 to 100, for the ids of tokens")
    )


class ChatRequest(Generation):
    refused = {
        **dict.fromkeys("audio function_call functions moderation reasoning_effort verbosity".split()),
        **{"parallel_tool_calls": True, "store": False, "modalities": ["text"], "web_search_options": None},
    }
    no_effect = {"user", "metadata", "prediction", *TUNING}
    messages: list[Message] = Field(
        min_length=1, description="text; a model that reads images or sound gets its own parts"
    )
    max_completion_tokens: int | None = done("as `max_tokens`, and before it", ge=1, le=LARGEST)
    tools: list[Tool] | None = done(TOOLS)
    tool_choice: Literal["auto", "none"] | None = ours(TOOL_CHOICE)
    response_format: ResponseFormat | None = ours(STRUCTURED)
    chat_template_kwargs: dict[str, Any] | None = done("transformers' own: variables of the chat template")
    logprobs: bool | None = ours(LOGPROBS)
    top_logprobs: int | None = ours("from 0 to 20 likely tokens, with `logprobs`", ge=0, le=20)


class CompletionRequest(Generation):
    refused = {"best_of": 1, "suffix": None}
    prompt: str | Ids | Prompts = Field(
        description="a text or the ids of its tokens, or up to 2,048 of either, answered in turn as choices"
    )
    echo: bool | None = ours("the prompt stands before the text, with its log-probabilities if they are wanted")
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = ours(LOGPROBS)

    def body(self) -> dict:
        return {**super().body(), "prompt": ""}

    def prompts(self) -> list[str | list[int]]:
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return self.prompt if several else [self.prompt]


class ResponseRequest(Parameters):
    refused = {
        **dict.fromkeys("access_programs background_options context_management conversation image".split()),
        **dict.fromkeys("max_tool_calls moderation previous_response_id prompt reasoning".split()),
        **{"background": False, "store": False, "top_logprobs": 0, "parallel_tool_calls": True},
        **{"truncation": "disabled", "include": []},
    }
    no_effect = {"user", "metadata", *TUNING}
    input: str | list[Item] = Field(min_length=1, description="a text, or messages as in chat completions")
    instructions: str | None = done("a system message in front")
    text: TextOptions | None = ours(f"its `format`: {STRUCTURED}")
    max_output_tokens: int | None = done("as `max_tokens`", ge=1, le=LARGEST)
    tools: list[FlatTool] | None = done(TOOLS)
    tool_choice: Literal["auto", "none"] | None = ours(TOOL_CHOICE)


class DecisionRequest(Parameters):
    """`/v1/systemone`. transformers checks everything but the name of the model."""

    model_config = ConfigDict(strict=True, extra="allow")

    def body(self) -> dict:
        return {name: value for name, value in self if name in self.model_fields_set}


def _characters(value: str | list | Part | Item | None) -> int:
    if isinstance(value, (str, NoneType)):
        return len(value or "")
    if isinstance(value, list):
        return sum(map(_characters, value))
    return _characters(value.text if isinstance(value, Part) else getattr(value, "content", None))
