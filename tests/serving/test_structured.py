"""Structured output: `response_format`, `text.format` and strict tools."""

import json
import sys
from typing import Literal

import jsonschema
import openai
import pydantic
import pytest
from transformers import AutoTokenizer
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as KNOWN

import hf_ssd
from hf_ssd.serving import structured
from hf_ssd.serving.calls import CallRunner
from hf_ssd.serving.parameters import ChatRequest

from ..helpers.servers import CHAT, PAIR, RESPONSES, ServerThread
from .test_answers import Forced, caller_folder

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["class", "function"]},
        "lines": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "kind", "lines"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
STRICT = {"name": "f", "parameters": SCHEMA, "strict": True}
OTHER = {"name": "g", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": function} for function in (STRICT, OTHER)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The embedded pair, with the templates of a model that calls tools."""
    with hf_ssd.launch_draft(str(PAIR / "draft"), num_threads=1) as assistant:
        folder, plan = caller_folder(tmp_path_factory), hf_ssd.SSDConfig(lookahead=3, budget=4)
        with ServerThread(folder, assistant, plan) as server:
            yield server


def valid(text: str, schema: dict = SCHEMA) -> dict:
    jsonschema.validate(found := json.loads(text), schema)
    return found


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_follows_its_schema_whole_and_streamed(server, temperature):
    before, asked = server.figures(), {"response_format": FORMAT, "temperature": temperature, "seed": 4}
    whole, streamed = server.whole_and_streamed("chat", "import os", 150, **asked)
    assert whole == streamed and whole[0].reason == "stop" and valid(whole[0].text)
    gained = server.gained(before)
    assert gained["tokens_total"] > gained["rounds_total"] + 4 and (temperature or gained["hits_total"] > 0)


def test_each_of_several_choices_follows_the_schema(server):
    answer = server.chat("import os", 150, response_format=FORMAT, temperature=1, seed=4, n=3)
    assert len({choice.message.content for choice in answer.choices}) > 1
    for choice in answer.choices:
        assert valid(choice.message.content)


def test_an_answer_is_any_object_and_ends_at_its_limit(server):
    answer = server.chat("import os", 8, response_format={"type": "json_object"}).choices[0]
    assert answer.message.content.startswith("{") and answer.finish_reason == "length"
    schema = {"type": "object", "maxProperties": 0}
    form = {"type": "json_schema", "json_schema": {"name": "empty", "schema": schema}}
    assert server.chat("import os", 8, response_format=form).choices[0].message.content == "{}"


class Thing(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    kind: Literal["class", "function"]


def test_openais_client_gets_its_own_types(server):
    asked = {"model": server.model, "temperature": 0}
    messages = [{"role": "user", "content": "import os"}]
    answer = server.client.chat.completions.parse(**asked, messages=messages, response_format=Thing, max_tokens=90)
    assert isinstance(answer.choices[0].message.parsed, Thing)
    answer = server.client.responses.parse(**asked, input="import os", text_format=Thing, max_output_tokens=90)
    assert isinstance(answer.output_parsed, Thing)


EMPTY = {"type": "function", "function": {"name": "g", "parameters": {"const": {}}, "strict": True}}


@pytest.mark.slow
@pytest.mark.parametrize("tool", [TOOLS[0], EMPTY], ids=["f", "g"])
def test_the_calls_of_a_strict_tool_follow_its_schema(server, monkeypatch, tool):
    tokens = server.processor("Sure.\n<tool_call>", add_special_tokens=False)["input_ids"]
    settings = CallRunner._settings

    def begun(self, rows, call, length):
        found = settings(self, rows, call, length)
        found["logits_processor"].insert(0, Forced(tokens, length, goes_on=True))
        return found

    monkeypatch.setattr(CallRunner, "_settings", begun)
    whole = server.chat("import os", 200, tools=[tool]).choices[0].message
    call, function = whole.tool_calls[0].function, tool["function"]
    assert call.name == function["name"]
    assert valid(call.arguments, function["parameters"]) is not None
    chunks = [chunk.choices[0].delta for chunk in server.chat("import os", 200, tools=[tool], stream=True)]
    streamed = [one.function.arguments for delta in chunks for one in delta.tool_calls or ()]
    assert streamed == [one.function.arguments for one in whole.tool_calls]


CALL = '<tool_call>\n{"name": "f", "arguments": {"name": "a", "kind": "class", "lines": []}}\n</tool_call>'


@pytest.mark.parametrize("marks", [(), ("<tool_call>", "</tool_call>")])  # those that are single tokens
def test_the_grammar_of_strict_tools(server, marks):
    tokenizer = AutoTokenizer.from_pretrained(server.model)
    tokenizer.add_tokens([*marks])
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "tools": TOOLS})
    matcher = structured.grammar_for(request, server.loaded_model, tokenizer).rows[0].matcher

    def taken(text: str) -> str:
        matcher.reset()
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        count = matcher.try_consume_tokens(tokens)
        return tokenizer.decode(tokens[:count]), matcher.is_accepting()

    for text in ("Sure.", CALL, f"Sure.\n{CALL}\n{CALL}", f"{CALL}\nDone.", CALL.replace('"f"', '"g"')[:40]):
        assert taken(text) == (text, not text.startswith('<tool_call>\n{"name": "g"'))
    for wrong in (CALL.replace('"f"', '"h"'), CALL.replace("class", "klass"), CALL.replace("[]", "[1]")):
        found, ends = taken(wrong)
        assert found != wrong and not ends


def test_the_marks_of_tool_calls_in_known_templates():
    marks = {types[0]: structured._marks(template) for types, template in KNOWN.items()}
    assert marks.pop("qwen2") == ("<tool_call>", "</tool_call>") and {*marks.values()} == {None}
    field = {"open": "<|a|>", "close": "<b>", "content": "json", "transform": {"function": "{content}"}}
    assert structured._marks({"fields": {"tool_calls": field}}) == ("<|a|>", "<b>") and structured._marks({}) is None


TEXT = {"format": {"type": "json_schema", "name": "thing", "schema": {"type": "strange"}}}
WRONG = [
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format", "needs a `schema`"),
    (CHAT, {"response_format": {"type": "json"}}, "response_format", "json_object"),
    (CHAT, {"response_format": FORMAT, "tools": TOOLS}, "response_format", "leave one of them out"),
    (RESPONSES, {"text": TEXT}, "text", "Invalid type: strange"),
    (CHAT, {"tools": [{**TOOLS[0], "function": {**STRICT, "parameters": {"type": "strange"}}}]}, "tools", "strange"),
]  # fmt: skip


@pytest.mark.parametrize("path, request_, name, message", WRONG)
def test_formats_that_are_refused(server, path, request_, name, message):
    assert message in server.refusal(path, **request_)
    assert server.request(path, **request_)[1]["error"]["param"] == name


def test_strict_tools_of_a_model_that_calls_them_otherwise_are_refused(server, monkeypatch):
    monkeypatch.setattr(
        structured, "get_response_template", lambda *_: next(t for k, t in KNOWN.items() if "gemma4" in k)
    )
    assert "`strict` needs a model whose tool calls are JSON" in server.refusal(CHAT, tools=TOOLS)


def test_without_llguidance_the_extra_is_named(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for request in ({"response_format": FORMAT}, {"tools": TOOLS}):
        with pytest.raises(openai.BadRequestError, match=r"pip install hf_ssd\[structured\]"):
            server.chat("import os", 8, **request)
    assert server.chat("import os", 8, tools=[TOOLS[1]], response_format={"type": "text"}).choices
