"""Requests as OpenAI's clients and evaluation programs send them."""

import json
import re
import socket
import time
from urllib.parse import urlsplit

import openai
import pytest
import requests

from hf_ssd.serving.parameters import ChatRequest

from ..helpers.servers import CHAT, COMPLETIONS, PROMPT, REQUESTS, RESPONSES, within
from ..helpers.suites import quick_first

VOCABULARY = 97


# ---------------------------------------------------------------- values that nothing can be computed with


def test_a_temperature_that_float32_does_not_hold_is_refused_and_the_least_one_is_greedy(server):
    for path, temperature in zip(REQUESTS, (1e-300, 5e-324, 1e-31)):
        sentence = server.refusal(path, temperature=temperature)
        assert sentence == f"`temperature` is {temperature}: use 0, or a number of a size from 1e-30 to 1e+30."
    texts = {server.complete(PROMPT, 12, temperature=temperature).choices[0].text for temperature in (0, 1e-30, 1e-9)}
    assert len(texts) == 1


@pytest.mark.parametrize(
    "setting, value",
    [
        *((name, token) for name in ("forced_eos_token_id", "forced_bos_token_id") for token in (VOCABULARY, -1)),
        *(("suppress_tokens", [token]) for token in (VOCABULARY, -1)),
        *(("bad_words_ids", [[5], [token]]) for token in (VOCABULARY, -1)),
        *(("sequence_bias", [[[token], 1.0]]) for token in (VOCABULARY, -1)),
        ("begin_suppress_tokens", [5, 10**12]),
        ("eos_token_id", [5, VOCABULARY]),
        ("pad_token_id", VOCABULARY),
    ],
)
def test_a_token_outside_of_the_vocabulary_is_refused_in_any_field(server, setting, value):
    sentence = server.refusal(COMPLETIONS, generation_config=json.dumps({"max_new_tokens": 2, setting: value}))
    assert re.fullmatch(rf"`{setting}` names token -?[0-9]+; the model has {VOCABULARY}\.", sentence)


@pytest.mark.parametrize(
    "setting, value",
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
def test_a_setting_with_which_nothing_can_be_computed_is_refused(server, setting, value):
    settings = json.dumps({"max_new_tokens": 2, "do_sample": True, setting: value})
    status, answer = server.request(COMPLETIONS, generation_config=settings)
    assert status == 400 and re.search(f"{setting}|`generation_config` cannot", answer["error"]["message"])


# ---------------------------------------------------------------- clients that leave within their body


@pytest.mark.parametrize("path", quick_first(["/live", *REQUESTS], 2))
def test_a_client_whose_body_does_not_end_leaves_nothing_in_the_log(server, capfd, caplog, path):
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    before = server.figures()
    for rest in (
        'Content-Length: 1000\r\n\r\n{"prompt"',
        'Transfer-Encoding: chunked\r\n\r\n9\r\n{"pro',
        "Transfer-Encoding: chunked\r\n\r\nno length\r\n",
    ):
        with socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port)) as client:
            client.sendall((head + rest).encode())
            time.sleep(0.2)
    time.sleep(0.3)
    assert server.complete(PROMPT, 2).usage.completion_tokens == 2, "the server goes on"
    assert within(10, lambda: server.figures()["finished"] == before["finished"] + 1)
    written = capfd.readouterr().err + caplog.text
    assert "Traceback" not in written and "ClientDisconnect" not in written and "ERROR" not in written


# ---------------------------------------------------------------- prompts


@pytest.mark.slow
def test_a_prompt_is_a_text_or_tokens_or_a_list_of_either(server):
    texts, before = [PROMPT, "abc", "stuvw"], server.figures()
    tokens = [server.processor(text)["input_ids"] for text in texts]
    single = [server.complete(text, 6) for text in texts]
    assert [server.complete(ids, 6).choices[0].text for ids in tokens] == [one.choices[0].text for one in single]
    for prompt in (texts, tokens):
        answer = server.complete(prompt, 6)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [choice.text for choice in answer.choices] == [one.choices[0].text for one in single]
        assert answer.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in single) == sum(map(len, tokens))
        assert answer.usage.completion_tokens == 18
    after = server.figures()
    assert after["finished"] - before["finished"] == 12, "each prompt is a call"
    rounds = after["rounds_total"] - before["rounds_total"] - 12  # the first of each call has nothing to verify yet
    assert rounds < 0.9 * 12 * 5 and after["hits_total"] > before["hits_total"]


def test_several_prompts_stream_one_after_the_other(server):
    texts = [PROMPT, "abc", "stuvw"]
    expected = [server.complete(text, 6, stop=["K"]).choices[0] for text in texts]
    chunks = list(server.complete(texts, 6, stream=True, stop=["K"]))
    order = [chunk.choices[0].index for chunk in chunks]
    assert order == sorted(order) and set(order) == {0, 1, 2}
    for index, choice in enumerate(expected):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(one.text for one in mine) == choice.text
        assert [one.finish_reason for one in mine if one.finish_reason] == [choice.finish_reason]
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
    assert chunks[-1].usage == usage == server.complete(texts, 6, stop=["K"]).usage


@pytest.mark.parametrize(
    "prompt, sentence",
    [
        ([PROMPT, ""], "The prompt is empty"),
        ([[5], [5, VOCABULARY]], f"`prompt` names token {VOCABULARY}; the model has {VOCABULARY}."),
        ([5, -1], "`prompt` names token -1"),
        ([], "`prompt`"),
        ([[5], []], "`prompt"),
        ([[5], "a"], "`prompt"),
        ([5, True], "`prompt"),
        (["a"] * 2049, "`prompt"),
        ([[5], [5] * 20_000], "takes fewer than 20000"),
    ],
    ids=lambda value: "" if isinstance(value, list) else value,
)
def test_one_wrong_prompt_of_several_is_refused_before_work(server, prompt, sentence):
    assert sentence in server.refusal(COMPLETIONS, prompt=prompt)


def test_a_client_that_leaves_several_prompts_or_choices_ends_them_all(server):
    before = server.figures()

    def are_cancelled(count: int) -> bool:
        return within(20, lambda: server.figures()["cancelled"] == before["cancelled"] + count)

    for number, (prompt, options) in enumerate([(PROMPT, {"n": 4, "temperature": 1.0}), ([PROMPT] * 50, {})]):
        stream = server.complete(prompt, 2000, stream=True, **options)
        next(iter(stream))
        stream.close()
        assert are_cancelled(number + 1)
    impatient = server.client.with_options(timeout=0.5)
    with pytest.raises(openai.APITimeoutError):
        impatient.completions.create(model=server.model, prompt=[PROMPT] * 50, max_tokens=2000, temperature=0)
    assert are_cancelled(3)
    time.sleep(0.5)
    assert server.figures()["tokens_total"] - before["tokens_total"] < 4000


# ---------------------------------------------------------------- responses, messages, tools


def test_responses_stream_only_if_asked(server):
    status, answer = server.request(RESPONSES)
    assert status == 200 and answer["object"] == "response" and answer["usage"]["output_tokens"] == 2
    events = server.client.responses.create(model=server.model, input=PROMPT, max_output_tokens=2, stream=True)
    assert list(events)[-1].type == "response.completed"


@pytest.mark.parametrize("empty", [{"tool_calls": []}, {"tool_calls": None}, {"refusal": None, "annotations": []}])
def test_an_empty_list_in_a_message_does_not_lose_its_text(server, empty):
    def asked(**more) -> int:
        messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "defgh", **more}]
        answer = server.client.chat.completions.create(model=server.model, messages=messages, max_tokens=2)
        return answer.usage.prompt_tokens

    assert asked(**empty) == asked()
    message = {"role": "assistant", "content": "defgh", **empty}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"required": [], "default": None}}}
    body = ChatRequest.model_validate({"messages": [message], "tools": [tool]}).body()
    assert body["messages"] == [{"role": "assistant", "content": "defgh"}]
    assert body["tools"] == [tool], "a schema stays as it is, because templates print it"


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_tools_that_the_template_does_not_use_are_refused(server, path):
    tool = {"type": "function", "name": "f", "function": {"name": "f"}}
    assert "does not use `tools`" in server.refusal(path, tools=[tool])
    for harmless in ({"tools": []}, {"tools": None}, {"tools": [tool], "tool_choice": "none"}):
        status, answer = server.request(path, **harmless)
        assert status == 200, answer


def test_clients_are_told_a_name_and_not_a_folder(server):
    folder, name = server.model, "tiny"
    assert folder.endswith(f"/{name}")
    told = [server.get(path) for path in ("/v1/models", f"/v1/models/{name}", "/health", "/metrics", "/")]
    for path, body in REQUESTS.items():
        for changes in ({}, {"model": name}, {"model": folder}, {"model": "other"}, {"stream": True}, {"tools": [5]}):
            told.append(requests.post(server.url + path, json={**body, **changes}, timeout=60).content.decode())
    assert all(folder not in text for text in told)
    assert f'"id":"{name}"' in told[0].replace(" ", "")
