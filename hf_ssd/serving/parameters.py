"""The parameters of OpenAI's requests: what each may be, and whether this server does it."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

DONE, NO_EFFECT, REFUSED = "done", "no effect", "refused"
TEXTS = ("text", "input_text", "output_text")  # types of a message's parts
LARGEST = 2**31 - 1


def done(about: str, **limits) -> Any:
    return Field(None, description=about, json_schema_extra={"how": DONE}, **limits)


def no_effect() -> Any:
    return Field(None, description="concerns no answer of this server", json_schema_extra={"how": NO_EFFECT})


def refused(but: str = "", **limits) -> Any:
    return Field(None, description=but, json_schema_extra={"how": REFUSED}, **limits)


def _is_an_object(text: str) -> str:
    if not isinstance(json.loads(text), dict):
        raise ValueError("is no JSON object")
    return text


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Open(BaseModel):
    """Has fields beside those that are checked here; a chat template may read them."""

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


class Message(Open):
    role: str
    content: str | list[Part] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Item(Open):
    """Of the input of `/v1/responses`: a message, a part of one, or a tool's call or output."""

    type: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None


class Tool(Open):
    type: Literal["function"]
    function: Function


class FlatTool(Open):
    type: Literal["function"]


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class ResponseText(Strict):
    format: TextFormat | None = None


Stop = Annotated[str, Field(min_length=1, max_length=256)]
Penalty = Annotated[float, Field(gt=-1, le=2)]
No = Literal[False]
Nothing = Annotated[float, Field(ge=0, le=0)]


class Parameters(Strict):
    """What all addresses take."""

    model: str | None = done("as `/v1/models` names it, or left out")
    temperature: float | None = done("from 0 to 2; 0 is greedy, and a positive one samples", ge=0, le=2)
    top_p: float | None = done("from 0 to 1; one below 1 samples, unless the temperature is 0", ge=0, le=1)
    seed: int | None = done("see [below](#what-a-seed-repeats)", ge=-(2**63), lt=2**64)
    stream: bool | None = done("server-sent events, a round at a time")
    stream_options: StreamOptions | None = done("the last chunk has the usage in any case")
    generation_config: Annotated[str, AfterValidator(_is_an_object)] | None = done(
        "transformers' own: the JSON of a `GenerationConfig`, which takes the place of the model's"
    )
    user: str | None = no_effect()

    def body(self) -> dict:
        """Returns the request as transformers' handlers read it, without the parameters that they do not do."""
        body = self.model_dump(exclude_unset=True, exclude_none=True)
        if body.get("tool_choice") == "none":
            body.pop("tools", None)
        fields = type(self).model_fields
        ours = {name for name in body if how(fields[name]) != DONE} | {"seed", "logit_bias", "stop", "tool_choice"}
        return {name: value for name, value in body.items() if name not in ours and value != []}

    def settings(self) -> dict:
        """Returns the fields of the generation config that transformers' handlers do not set."""
        settings = {}
        if self.temperature != 0 and (self.temperature or (self.top_p is not None and self.top_p < 1)):
            settings["do_sample"] = True
        if bias := getattr(self, "logit_bias", None):
            settings["sequence_bias"] = {(int(token),): float(value) for token, value in bias.items()}
        return settings

    def stops(self) -> list[str]:
        """Returns the strings before which the text ends."""
        stop = getattr(self, "stop", None) or []
        return [stop] if isinstance(stop, str) else stop

    def characters(self) -> int:
        """Returns how many characters there are to tokenize."""
        return sum(_characters(getattr(self, name, None)) for name in ("prompt", "messages", "input", "instructions"))

    def media(self) -> set[str]:
        """Returns the types of the messages' parts that are no text."""
        asked, kinds = getattr(self, "messages", None) or getattr(self, "input", None), set()
        for message in asked if isinstance(asked, list) else []:
            kinds |= {part.type for part in message.content} if isinstance(message.content, list) else set()
            if message.role is None and (message.type or "").startswith("input_"):  # a part that stands by itself
                kinds.add(message.type)
        return kinds.difference(TEXTS)


class Generation(Parameters):
    """What both addresses of completions take."""

    max_tokens: int | None = done("at least 1; a text ends where the model's positions do", ge=1, le=LARGEST)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = done(
        "a text, or up to 16, before which the answer ends; no empty one"
    )
    frequency_penalty: Penalty | None = done("as in `transformers serve`: a repetition penalty of 1 and this number")
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None = (
        done("from -100 to 100, for the ids of tokens")
    )
    n: Literal[1] | None = refused("1")
    presence_penalty: Nothing | None = refused("0")


class ChatRequest(Generation):
    """`/v1/chat/completions`"""

    messages: list[Message] = Field(
        min_length=1,
        description="text; a model that reads images or sound gets its own parts",
        json_schema_extra={"how": DONE},
    )
    max_completion_tokens: int | None = done("as `max_tokens`, and before it", ge=1, le=LARGEST)
    tools: list[Tool] | None = done("functions, for models whose chat template has tools")
    tool_choice: Literal["auto", "none"] | None = done('"auto", or "none", which leaves the tools out')
    chat_template_kwargs: dict[str, Any] | None = done("transformers' own: variables of the chat template")
    parallel_tool_calls: Literal[True] | None = refused("true")
    logprobs: No | None = refused("false")
    top_logprobs: Nothing | None = refused("0")
    response_format: TextFormat | None = refused('{"type": "text"}')
    modalities: list[Literal["text"]] | None = refused('["text"]')
    store: No | None = refused("false")
    audio: None = refused()
    function_call: None = refused()
    functions: None = refused()
    moderation: None = refused()
    reasoning_effort: None = refused()
    verbosity: None = refused()
    web_search_options: None = refused()
    metadata: dict[str, Any] | None = no_effect()
    prediction: dict[str, Any] | None = no_effect()
    prompt_cache_key: str | None = no_effect()
    prompt_cache_options: dict[str, Any] | None = no_effect()
    prompt_cache_retention: str | None = no_effect()
    safety_identifier: str | None = no_effect()
    service_tier: str | None = no_effect()


class CompletionRequest(Generation):
    """`/v1/completions`"""

    prompt: str = Field(description="one text", json_schema_extra={"how": DONE})
    best_of: Literal[1] | None = refused("1")
    echo: No | None = refused("false")
    logprobs: None = refused()
    suffix: None = refused()


class ResponseRequest(Parameters):
    """`/v1/responses`"""

    input: str | list[Item] = Field(
        min_length=1, description="a text, or messages as in chat completions", json_schema_extra={"how": DONE}
    )
    instructions: str | None = done("a system message in front")
    max_output_tokens: int | None = done("as `max_tokens`", ge=1, le=LARGEST)
    tools: list[FlatTool] | None = done("functions, for models whose chat template has tools")
    tool_choice: Literal["auto", "none"] | None = done('"auto", or "none", which leaves the tools out')
    parallel_tool_calls: Literal[True] | None = refused("true")
    text: ResponseText | None = refused('{"format": {"type": "text"}}')
    truncation: Literal["disabled"] | None = refused('"disabled"')
    background: No | None = refused("false")
    store: No | None = refused("false")
    top_logprobs: Nothing | None = refused("0")
    include: Annotated[list, Field(max_length=0)] | None = refused("[]")
    access_programs: None = refused()
    background_options: None = refused()
    context_management: None = refused()
    conversation: None = refused()
    image: None = refused()
    max_tool_calls: None = refused()
    moderation: None = refused()
    previous_response_id: None = refused()
    prompt: None = refused()
    reasoning: None = refused()
    metadata: dict[str, Any] | None = no_effect()
    prompt_cache_key: str | None = no_effect()
    prompt_cache_options: dict[str, Any] | None = no_effect()
    prompt_cache_retention: str | None = no_effect()
    safety_identifier: str | None = no_effect()
    service_tier: str | None = no_effect()


def how(field) -> str:
    """Returns whether a field is done, has no effect, or is refused."""
    return field.json_schema_extra["how"]


def _characters(value) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(map(_characters, value))
    if isinstance(value, Part):
        return len(value.text or "")
    return _characters(value.content) if isinstance(value, (Message, Item)) else 0


def table() -> str:
    """Returns the parameters of the three addresses as a table in Markdown."""
    kinds = {"chat": ChatRequest, "completions": CompletionRequest, "responses": ResponseRequest}
    lines = ["| parameter | " + " | ".join(kinds) + " | values |", "| --- | --- | --- | --- | --- |"]
    for name in sorted({name for kind in kinds.values() for name in kind.model_fields}):
        fields = [kind.model_fields.get(name) for kind in kinds.values()]
        cells = ["" if field is None else how(field) for field in fields]
        about = next((field.description for field in fields if field is not None and how(field) != REFUSED), None)
        neutral = sorted({f.description for f in fields if f is not None and how(f) == REFUSED and f.description})
        about = about or ("taken as " + " or ".join(f"`{value}`" for value in neutral) if neutral else "")
        lines.append(f"| `{name}` | {' | '.join(cells)} | {about} |")
    return "\n".join(lines) + "\n"
