"""Structured output of a request: the grammar of its `response_format`, or that of its strict tools."""

import json
import re

from transformers.cli.serving.utils import get_response_template

from ..grammar import DEFAULTS, Grammar
from .errors import Refusal
from .parameters import Parameters, ResponseFormat, TextFormat


def _schema(format: TextFormat | ResponseFormat | None) -> dict | None:
    """Returns the JSON schema of an answer, `None` if the answer may be any text."""
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return {"type": "object"}
    schema = getattr(format, "json_schema", format)
    if schema is None or schema.of_json is None:
        raise ValueError("the type `json_schema` needs a `schema`")
    return schema.of_json


def grammar_for(request: Parameters, model, tokenizer) -> Grammar | None:
    """Returns the processor of a request, if its answer is to be structured. Raises [`Refusal`] if it cannot be."""
    fields = type(request).model_fields  # `/v1/systemone` takes any others
    if "tools" not in fields:
        return None
    name = "text" if "text" in fields else "response_format"
    tools = [] if request.tool_choice == "none" else request.tools or []
    tools = [getattr(tool, "function", tool).model_dump() for tool in tools]
    try:
        asked = getattr(request, name)
        schema = _schema(getattr(asked, "format", None) if name == "text" else asked)
        if schema is not None and tools:
            raise ValueError('cannot be combined with `tools`; leave one of them out, or set `tool_choice` to "none"')
        if schema is not None:
            return Grammar(schema, tokenizer, model.generation_config.eos_token_id)
        if not any(tool.get("strict") for tool in tools):
            return None
        name = "tools"
        return Grammar.from_lark(_calls(tools, model, tokenizer), tokenizer, model.generation_config.eos_token_id)
    except (ImportError, TypeError, ValueError) as error:
        raise Refusal(f"`{name}`: {error}", name) from error


def _calls(tools: list[dict], model, tokenizer) -> str:
    """Returns the grammar of an answer with any text, in which each call of a tool follows the tool's schema."""
    marks = _marks(get_response_template(tokenizer, model) or {})
    if marks is None:
        raise ValueError("`strict` needs a model whose tool calls are JSON between two marks; leave it out")
    calls = []
    for tool in tools:
        schema = tool.get("parameters") if tool.get("strict") else None
        schema = {"type": "object"} if schema is None else schema
        Grammar(schema, tokenizer, model.generation_config.eos_token_id)  # whose error says what is wrong
        fields = {"name": {"const": tool["name"]}, "arguments": schema}
        calls.append({"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False})
    call = json.dumps({"anyOf": calls, "x-guidance": DEFAULTS})
    known = tokenizer.get_added_vocab()
    opening, closing = (f"<[{known[mark]}]>" if mark in known else json.dumps(mark) for mark in marks)
    return f"""
        start: (call)* TEXT
        call: opening "\\n" %json {call} "\\n" {closing}
        opening{"" if marks[0] in known else "[lazy]"}: TEXT {opening}
        TEXT: /(.|\\n)*/
    """


def _marks(template: dict) -> tuple[str, str] | None:
    """Returns the marks before and after a tool call in a response template, if name and arguments are JSON there."""
    field = template.get("fields", {}).get("tool_calls", {})
    pattern = field.get("open_pattern", re.escape(field.get("open", ""))).removeprefix(r"\s*")
    opening, closing = re.sub(r"\\(\W)", r"\1", pattern), field.get("close")
    is_json = field.get("content") == "json" and not field.get("content_args")
    is_whole = field.get("transform", {}).get("function") == "{content}"
    if not (is_json and is_whole and opening and isinstance(closing, str) and re.escape(opening) == pattern):
        return None
    return opening, closing
