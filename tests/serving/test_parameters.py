"""Parameters of requests: which are supported, which values are refused by which sentence, and what documents say."""

import json
import re
import typing
from pathlib import Path

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParameters
from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionParameters
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as ResponseParameters

from hf_ssd.serving import parameters

from ..helpers.servers import CHAT, COMPLETIONS, PROMPT, REQUESTS, RESPONSES, said

VOCABULARY = 97
KINDS = {CHAT: parameters.ChatRequest, COMPLETIONS: parameters.CompletionRequest, RESPONSES: parameters.ResponseRequest}


def names_of(kind: type[parameters.Parameters]) -> set[str]:
    return {*kind.model_fields, *kind.refused, *kind.no_effect}


WRONG = [5, -1, 1.5, True, "text", "", [], ["text"], [5], {}, {"a": 1}, {"type": "text"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
TOOL = {"type": "function", "name": "f", "function": {"name": "f"}}
INPUT_IMAGE = {"type": "input_image", "image_url": "data:,"}


def setting(**settings) -> dict:
    """Returns the parameter for a setting of transformers."""
    return {"generation_config": json.dumps({"max_new_tokens": 2, **settings})}


def at(token: int) -> dict:
    """Returns the settings that name tokens, each with this one."""
    return {
        **dict.fromkeys(("forced_eos_token_id", "forced_bos_token_id", "pad_token_id"), token),
        **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "eos_token_id"), [5, token]),
        **{"bad_words_ids": [[5], [token]], "sequence_bias": [[[token], 1.0]]},
    }


NO_TOKENS = [
    *((path, "max_tokens") for path in (CHAT, COMPLETIONS)),
    *((CHAT, "max_completion_tokens"), (RESPONSES, "max_output_tokens")),
]
WRONG_PROMPTS = [
    ([PROMPT, ""], "The prompt is empty"),
    ([[5], [5, VOCABULARY]], f"`prompt` names token {VOCABULARY}; the model has {VOCABULARY}."),
    ([5, -1], "`prompt` names token -1"),
    *((prompt, "`prompt") for prompt in ([], [[5], []], [[5], "a"], [1, "a"], [5, True], ["a"] * 2049)),
    ([[5], [5] * 20_000], "takes fewer than 20000"),
]
NOT_DONE = [
    (CHAT, {"logprobs": False, "top_logprobs": 3}, "`top_logprobs` needs `logprobs` to be true."),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "`top_logprobs`: Input should be less than or equal to 20."),
    (COMPLETIONS, {"logprobs": 6}, "`logprobs`: Input should be less than or equal to 5."),
    (COMPLETIONS, {"n": 9}, "`n`: Input should be less than or equal to 8."),
    (CHAT, {"n": 0}, "`n`: Input should be greater than or equal to 1."),
    (CHAT, {"echo": True}, "Unknown parameter: `echo`. Settings of transformers can stand in `generation_config`."),
    (COMPLETIONS, {"suffix": "end"}, "`suffix` is not supported."),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    (CHAT, {"presence_penalty": 2.5}, "presence_penalty"),
    (CHAT, {"stop": ""}, "stop"),
    (COMPLETIONS, {"logit_bias": {"97": 1}}, "logit_bias"),
    (COMPLETIONS, {"temperature": -1}, "temperature"),
    (COMPLETIONS, {"temperature": 2.5}, "temperature"),
    (COMPLETIONS, {"top_p": 2}, "top_p"),
    (COMPLETIONS, {"seed": 2**64}, "seed"),
    (COMPLETIONS, {"colour": "red"}, "colour"),
    (COMPLETIONS, setting(return_dict_in_generate=True), "return_dict_in_generate"),
    (CHAT, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template"),
    (CHAT, {"messages": IMAGE}, "image_url"),
    (RESPONSES, {"input": [{"role": "user", "content": [INPUT_IMAGE]}]}, "input_image"),
    (RESPONSES, {"input": [INPUT_IMAGE]}, "input_image"),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text"),
    *((path, {"tools": [TOOL]}, "does not use `tools`") for path in (CHAT, RESPONSES)),  # the template
    *((path, {name: "5"}, name) for path, kind in KINDS.items() for name in kind.refused),
    *(
        (path, {name: count}, f"`{name}`: Input should be greater than or equal to 1.")
        for path, name in NO_TOKENS
        for count in (0, -1)
    ),
    *(
        (COMPLETIONS, {"max_tokens": None, **setting(max_new_tokens=count)}, "`max_new_tokens` must be greater than 0")
        for count in (0, -1)
    ),
    *(
        (path, {"temperature": least}, f"`temperature` is {least}: use 0, or a number of a size from 1e-30 to 1e+30.")
        for path, least in zip(REQUESTS, (1e-300, 5e-324, 1e-31))
    ),
    *((COMPLETIONS, {"prompt": prompt}, words) for prompt, words in WRONG_PROMPTS),
    *(
        (COMPLETIONS, setting(**{name: value}), f"`{name}` names token {token}; the model has {VOCABULARY}.")
        for token in (VOCABULARY, -1, 10**12)
        for name, value in at(token).items()
    ),
]


@pytest.mark.parametrize("path, request_, words", NOT_DONE, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_not_done_is_refused_by_its_name(server, path, request_, words):
    sentence = server.refusal(path, **request_)
    assert sentence == words if words.endswith(".") else words in sentence


@pytest.mark.parametrize(
    "path, request_",
    [
        (CHAT, {"stop": [], "n": 1, "logprobs": False, "tool_choice": "auto", "response_format": {"type": "text"}}),
        (CHAT, {"presence_penalty": 0.0, "user": "me", "metadata": {"a": "b"}, "store": False, "seed": None}),
        *((path, {"tools": [TOOL], "tool_choice": "none"}) for path in (CHAT, RESPONSES)),
        *((path, {"tools": tools}) for path in (CHAT, RESPONSES) for tools in ([], None)),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]}),
        (COMPLETIONS, {"stop": None, "n": 1, "best_of": 1, "echo": False, "logprobs": None, "frequency_penalty": 0}),
        (COMPLETIONS, {"stop": [], "seed": 2**64 - 1}),
        (RESPONSES, {"stream": False, "text": {"format": {"type": "text"}}, "include": [], "store": False}),
    ],
)
def test_what_asks_for_nothing_is_taken(server, path, request_):
    status, answer = server.request(path, **request_)
    assert status == 200, answer


@pytest.mark.parametrize(
    "name, value",
    [
        ("repetition_penalty", 5e-324),
        ("temperature", 1e300),
        ("min_p", float("nan")),
        ("top_k", 10**31),
        ("num_beams", 10**12),
        ("encoder_no_repeat_ngram_size", 10**9),
        ("prefill_chunk_size", [5]),
        ("prefill_chunk_size", -1),
        ("forced_eos_token_id", True),
        ("forced_eos_token_id", {"a": 1}),
        ("exponential_decay_length_penalty", [5]),
    ],
)
def test_a_setting_with_which_nothing_can_be_computed_is_refused(server, name, value):
    status, answer = server.request(COMPLETIONS, **setting(do_sample=True, **{name: value}))
    assert status == 400 and re.search(f"{name}|`generation_config` cannot", answer["error"]["message"])


def test_the_least_temperature_is_greedy(server):
    texts = {server.complete(PROMPT, 12, temperature=temperature).choices[0].text for temperature in (0, 1e-30, 1e-9)}
    assert len(texts) == 1


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_a_logit_bias_of_whole_numbers_decides(server, ask):
    (choice,) = said(server.chunks(ask, PROMPT, 5, False, logit_bias={"5": 100}))
    assert choice.text == server.processor.decode([5] * 5)


@pytest.mark.slow
@pytest.mark.parametrize("path", REQUESTS)
def test_values_of_another_kind_are_refused_in_openais_form(server, path):
    """Each parameter gets each of some values: it is served, or refused with 400."""
    fields, statuses = names_of(KINDS[path]), set()
    deeper = lambda value: [  # noqa: E731  places that templates read
        {"messages": [{"role": value, "content": value}]},
        {"messages": [{"role": "user", "content": "a", "tool_calls": value, "tool_call_id": value}]},
        {"messages": [{"role": "user", "content": [value]}], "tools": [value]},
        {"input": [value], "instructions": value, "tools": [{"type": "function", "parameters": value}]},
        {"input": [{"role": value, "content": value}]},
        {"input": [{"type": "function_call_output", "output": value}]},
        {"generation_config": json.dumps({"max_new_tokens": value})},
        {"generation_config": json.dumps({"top_k": value, "max_new_tokens": 1, "do_sample": True})},
    ]
    for value in WRONG:
        for body in [*({name: value} for name in sorted(fields)), *deeper(value)]:
            if body == {"stream": True} or not body.keys() <= fields:
                continue
            status, answer = server.request(path, **{"stream": False, **body})
            statuses.add(status)
            assert status in (200, 400), (body, answer)
            if status == 400:
                assert answer["error"]["type"] == "invalid_request_error" and answer["error"]["message"], answer
    assert statuses == {200, 400}


def table() -> str:
    """Returns the parameters of the three addresses as a table in Markdown."""
    kinds, lines = KINDS.values(), ["| parameter | chat | completions | responses | values |", "|" + " --- |" * 5]
    for name in sorted({name for kind in kinds for name in names_of(kind)}):
        groups = [{"done": kind.model_fields, "no effect": kind.no_effect, "refused": kind.refused} for kind in kinds]
        cells = [next((how for how, names in group.items() if name in names), "") for group in groups]
        about = [kind.model_fields[name].description for kind in kinds if name in kind.model_fields]
        about += ["concerns no answer of this server"] if "no effect" in cells else []
        refused = [kind.refused[name] for kind in kinds if kind.refused.get(name) is not None]
        about += [f"taken as `{json.dumps(nothing)}`" for nothing in refused]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {(about or [''])[0]} |")
    return "\n".join(lines) + "\n"


def test_the_document_has_the_table_of_parameters():
    assert table() in (Path(__file__).parents[2] / "docs" / "serving.md").read_text(), table()


def test_the_table_names_every_parameter_of_openais_and_no_other():
    theirs = {CHAT: ChatParameters, COMPLETIONS: CompletionParameters, RESPONSES: ResponseParameters}
    of_transformers = {"generation_config", "chat_template_kwargs", "seed", "stream", "stream_options"}
    for path, kind in KINDS.items():
        names = set(typing.get_type_hints(theirs[path]))
        assert names_of(kind) >= names, "a parameter of OpenAI's is neither done nor refused"
        assert names_of(kind) <= names | of_transformers
