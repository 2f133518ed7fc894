"""Requests as OpenAI's clients and evaluation programs send them."""

import socket
import time
from urllib.parse import urlsplit

import openai
import pytest
import requests

from hf_ssd.serving.parameters import ChatRequest

from ..helpers.servers import PROMPT, REQUESTS, RESPONSES, within
from ..helpers.suites import quick_first

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
    assert within(10, lambda: server.gained(before)["finished"] == 1)
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
    gained = server.gained(before)
    assert gained["finished"] == 12, "each prompt is a call"
    rounds = gained["rounds_total"] - 12  # the first of each call has nothing to verify yet
    assert rounds < 0.9 * 12 * 5 and gained["hits_total"] > 0


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


def test_a_client_that_leaves_several_prompts_or_choices_ends_them_all(server):
    before = server.figures()

    def are_cancelled(count: int) -> bool:
        return within(20, lambda: server.gained(before)["cancelled"] == count)

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
    assert server.gained(before)["tokens_total"] < 4000


# ---------------------------------------------------------------- responses, messages, names


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


def test_clients_are_told_a_name_and_not_a_folder(server):
    folder, name = server.model, "tiny"
    assert folder.endswith(f"/{name}")
    told = [server.get(path) for path in ("/v1/models", f"/v1/models/{name}", "/health", "/metrics", "/")]
    for path, body in REQUESTS.items():
        for changes in ({}, {"model": name}, {"model": folder}, {"model": "other"}, {"stream": True}, {"tools": [5]}):
            told.append(requests.post(server.url + path, json={**body, **changes}, timeout=60).content.decode())
    assert all(folder not in text for text in told)
    assert f'"id":"{name}"' in told[0].replace(" ", "")
