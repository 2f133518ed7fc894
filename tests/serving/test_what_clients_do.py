"""What clients of the server do: they ask for what it cannot do, leave, send seeds, long prompts and broken bodies."""

import http.client
import json
import re
import socket
import threading
import typing
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest
import torch
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParameters
from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionParameters
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as ResponseParameters

from hf_ssd.serving import gate, parameters
from hf_ssd.serving.server import hosts

from ..helpers.servers import LONG, ServerThread, within

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PROMPT = "abcdefgh"
MESSAGES = [{"role": "user", "content": PROMPT}]
REQUESTS = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": PROMPT}, RESPONSES: {"input": PROMPT}}
KINDS = {
    CHAT: parameters.ChatRequest,
    COMPLETIONS: parameters.CompletionRequest,
    RESPONSES: parameters.ResponseRequest,
}


def names_of(kind: type[parameters.Parameters]) -> set[str]:
    return {*kind.model_fields, *kind.refused, *kind.no_effect}


@pytest.fixture
def server(tiny_server):
    return tiny_server


def refused(server, path: str, body: dict | bytes, **headers) -> tuple[int, str]:
    """Returns status and sentence of a refusal, which has OpenAI's form."""
    body = body if isinstance(body, bytes) else json.dumps({"max_tokens": 2, **REQUESTS[path], **body}).encode()
    if path == RESPONSES:
        body = body.replace(b'"max_tokens"', b'"max_output_tokens"')
    status, answer = server.post(path, body, **headers)
    assert status >= 400, answer
    assert answer.keys() == {"error"} and answer["error"].keys() == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert isinstance(answer["error"]["message"], str) and answer["error"]["message"]
    return status, answer["error"]["message"]


# ---------------------------------------------------------------- sampling and seeds


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_a_positive_temperature_samples(server, ask):
    def text(**options) -> str:
        answer = getattr(server, ask)(PROMPT, 12, **options).choices[0]
        return answer.text if ask == "complete" else answer.message.content

    greedy = text(temperature=0)
    assert len({text(temperature=1.5) for _ in range(4)}) > 1
    assert len({text(temperature=openai.omit, top_p=0.9) for _ in range(4)}) > 1
    assert text(temperature=0, top_p=0.9) == text(temperature=openai.omit) == greedy


def test_the_page_samples_with_the_temperature_of_the_api(server):
    assert len({"".join(live(server, temperature=1.5)[0]) for _ in range(4)}) > 1
    assert len({"".join(live(server, temperature=0)[0]) for _ in range(2)}) == 1


def live(server, **options) -> tuple[list[str], list[dict]]:
    """Returns the texts of the tokens that the page is sent, and all events."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    body = json.dumps({"prompt": PROMPT, "max_new_tokens": 12, **options})
    connection.request("POST", "/live", body, {"content-type": "application/json"})
    lines = connection.getresponse().read().decode().split("\n\n")
    connection.close()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    return [text for event in events for text, _ in event.get("tokens", ())], events


def at_once(count: int, ask) -> list:
    """Returns what `ask(i)` returns in as many threads."""
    results = [None] * count

    def run(i: int) -> None:
        results[i] = ask(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_requests_with_one_seed_give_one_text_although_others_are_between(server):
    def ask(i: int) -> str:
        seed = 5 if i % 2 else openai.omit
        return server.complete(PROMPT, 12, temperature=1.0, seed=seed).choices[0].text

    alone = ask(1)
    texts = at_once(8, ask)
    assert set(texts[1::2]) == {alone}
    assert len(set(texts[0::2])) > 1


def test_a_seed_of_one_client_does_not_reach_the_answers_of_others(server):
    def others() -> str:
        return server.complete(PROMPT, 12, temperature=1.0).choices[0].text

    texts = []
    for _ in range(3):
        server.complete(PROMPT, 4, temperature=1.0, seed=5)
        texts.append(others())
    assert len(set(texts)) > 1
    torch.manual_seed(7)
    expected = [others(), others()]
    torch.manual_seed(7)
    first = others()
    server.complete(PROMPT, 4, temperature=1.0, seed=5)
    assert [first, others()] == expected, "a seed moved on the generator of the others"


# ---------------------------------------------------------------- numbers of tokens, and clients that leave


@pytest.mark.parametrize(
    "path, name", [(COMPLETIONS, "max_tokens"), (CHAT, "max_tokens"), (CHAT, "max_completion_tokens")]
)
@pytest.mark.parametrize("count", [0, -1])
def test_no_tokens_are_refused(server, path, name, count):
    assert refused(server, path, {name: count}) == (400, f"`{name}`: Input should be greater than or equal to 1.")
    assert refused(server, RESPONSES, {"max_output_tokens": count})[0] == 400
    sentence = refused(server, path, {"max_tokens": None, "generation_config": json.dumps({"max_new_tokens": count})})
    assert sentence[0] == 400 and "`max_new_tokens` must be greater than 0" in sentence[1]


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_call_and_what_waits_is_dropped(server, path, stream):
    """Three clients leave a call that would fill all positions; the next one is served at once."""
    before = server.figures()
    name = "max_output_tokens" if path == RESPONSES else "max_tokens"
    body = json.dumps({**REQUESTS[path], name: LONG, "temperature": 0, "stream": stream})
    connections = []
    for _ in range(3):
        connections.append(http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60))
        connections[-1].request("POST", path, body, {"content-type": "application/json"})
    assert within(30, lambda: server.figures()["tokens_total"] > before["tokens_total"] + 10)
    for connection in connections:
        if stream:
            connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
    assert server.complete(PROMPT, 3).usage.completion_tokens == 3
    after = server.figures()
    assert after["cancelled"] - before["cancelled"] == 3 and after["finished"] - before["finished"] == 1
    assert after["tokens_total"] - before["tokens_total"] < LONG / 2


def test_clients_that_try_again_leave_nothing_to_do(server):
    before = server.figures()
    impatient = server.client.with_options(timeout=0.3, max_retries=2)
    with pytest.raises(openai.APITimeoutError):
        impatient.completions.create(model=server.model, prompt=PROMPT, max_tokens=LONG, temperature=0)
    assert server.complete(PROMPT, 3).usage.completion_tokens == 3
    assert within(20, lambda: server.figures()["cancelled"] - before["cancelled"] >= 1)
    assert server.figures()["tokens_total"] - before["tokens_total"] < LONG / 2


# ---------------------------------------------------------------- parameters

WRONG = [5, -1, 1.5, True, "text", "", [], ["text"], [5], {}, {"a": 1}, {"type": "text"}]
NOT_DONE = [
    (CHAT, {"logprobs": True, "top_logprobs": 3}, "logprobs"),
    (CHAT, {"n": 2}, "n"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    (CHAT, {"presence_penalty": 1}, "presence_penalty"),
    (CHAT, {"stop": ""}, "stop"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (COMPLETIONS, {"logprobs": 3}, "logprobs"),
    (COMPLETIONS, {"best_of": 2}, "best_of"),
    (COMPLETIONS, {"n": 2}, "n"),
    (COMPLETIONS, {"echo": True}, "echo"),
    (COMPLETIONS, {"suffix": "b"}, "suffix"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"logit_bias": {"97": 1}}, "logit_bias"),
    (COMPLETIONS, {"temperature": -1}, "temperature"),
    (COMPLETIONS, {"temperature": 2.5}, "temperature"),
    (COMPLETIONS, {"top_p": 2}, "top_p"),
    (COMPLETIONS, {"seed": 2**64}, "seed"),
    (COMPLETIONS, {"colour": "red"}, "colour"),
    (COMPLETIONS, {"generation_config": '{"return_dict_in_generate": true}'}, "return_dict_in_generate"),
    (CHAT, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "image_url",
    ),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
        "input_image",
    ),
    (RESPONSES, {"input": [{"type": "input_image", "image_url": "data:,"}]}, "input_image"),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text"),
    (RESPONSES, {"previous_response_id": "5"}, "previous_response_id"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, request_, name", NOT_DONE, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_not_done_is_refused_by_its_name(server, path, request_, name, stream):
    status, sentence = refused(server, path, {**request_, "stream": stream})
    assert status == 400 and name in sentence


@pytest.mark.parametrize(
    "path, request_",
    [
        (CHAT, {"stop": [], "n": 1, "logprobs": False, "tool_choice": "auto", "response_format": {"type": "text"}}),
        (CHAT, {"presence_penalty": 0.0, "user": "me", "metadata": {"a": "b"}, "store": False, "seed": None}),
        (CHAT, {"tool_choice": "none", "tools": [{"type": "function", "function": {"name": "f"}}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]}),
        (COMPLETIONS, {"stop": None, "n": 1, "best_of": 1, "echo": False, "logprobs": None, "frequency_penalty": 0}),
        (COMPLETIONS, {"stop": [], "seed": 2**64 - 1}),
        (RESPONSES, {"stream": False, "text": {"format": {"type": "text"}}, "include": [], "store": False}),
    ],
)
def test_what_asks_for_nothing_is_taken(server, path, request_):
    body = {"max_output_tokens" if path == RESPONSES else "max_tokens": 2, **REQUESTS[path], **request_}
    status, answer = server.post(path, json.dumps(body).encode())
    assert status == 200, answer


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_a_logit_bias_of_whole_numbers_decides(server, ask):
    answer = getattr(server, ask)(PROMPT, 5, logit_bias={"5": 100}).choices[0]
    text = answer.text if ask == "complete" else answer.message.content
    assert text == server.processor.decode([5] * 5)


@pytest.mark.parametrize("path", REQUESTS)
def test_values_of_another_kind_are_refused_in_openais_form(server, path):
    """Each parameter gets each of some values: it is served, or refused with 400."""
    fields = names_of(KINDS[path])
    statuses = set()
    for name in fields:
        for value in WRONG:
            cap = {"max_output_tokens" if path == RESPONSES else "max_tokens": 1}
            body = json.dumps({**cap, "stream": False, **REQUESTS[path], name: value}).encode()
            if name == "stream" and value is True:
                continue
            status, answer = server.post(path, body)
            statuses.add(status)
            assert status in (200, 400), (name, value, answer)
            if status == 400:
                assert answer["error"]["type"] == "invalid_request_error" and answer["error"]["message"], answer
    assert statuses == {200, 400}
    for value in WRONG:  # deeper places, which templates read
        for body in [
            {"messages": [{"role": value, "content": value}]},
            {"messages": [{"role": "user", "content": "a", "tool_calls": value, "tool_call_id": value}]},
            {"messages": [{"role": "user", "content": [value]}], "tools": [value]},
            {"input": [value], "instructions": value, "tools": [{"type": "function", "parameters": value}]},
            {"input": [{"role": value, "content": value}]},
            {"input": [{"type": "function_call_output", "output": value}]},
            {"generation_config": json.dumps({"max_new_tokens": value})},
            {"generation_config": json.dumps({"top_k": value, "max_new_tokens": 1, "do_sample": True})},
        ]:
            if not body.keys() <= fields:
                continue
            cap = {"max_output_tokens" if path == RESPONSES else "max_tokens": 1}
            status, answer = server.post(path, json.dumps({**REQUESTS[path], **cap, "stream": False, **body}).encode())
            assert status in (200, 400), (body, answer)


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_an_error_inside_a_stream_reaches_openais_client_with_its_message(server, ask, monkeypatch):
    def fail(streamer, **kwargs):
        streamer.put(torch.tensor([[5]]))
        streamer.put(torch.tensor([5]))
        raise RuntimeError('No "memory"\nis left.')

    monkeypatch.setattr(server.loaded_model, "generate", fail)
    with pytest.raises(openai.APIError) as caught:
        list(getattr(server, ask)(PROMPT, 5, stream=True))
    assert caught.value.message == 'No "memory"\nis left.' and caught.value.type == "server_error"
    with pytest.raises(openai.InternalServerError, match="is left"):
        getattr(server, ask)(PROMPT, 5)


def test_a_refusal_while_it_streams_reaches_openais_client_with_its_message(server):
    options = {"generation_config": json.dumps({"num_beams": 4, "max_new_tokens": 5})}
    with pytest.raises(openai.APIError, match="num_beams"):
        list(server.complete(PROMPT, 5, stream=True, extra_body=options))
    with pytest.raises(openai.BadRequestError, match="num_beams"):
        server.complete(PROMPT, 5, extra_body=options)


def table() -> str:
    """Returns the parameters of the three addresses as a table in Markdown."""
    kinds, lines = KINDS.values(), ["| parameter | chat | completions | responses | values |", "|" + " --- |" * 5]
    for name in sorted({name for kind in kinds for name in names_of(kind)}):
        groups = [{"done": kind.model_fields, "no effect": kind.no_effect, "refused": kind.refused} for kind in kinds]
        cells = [next((how for how, names in group.items() if name in names), "") for group in groups]
        about = [kind.model_fields[name].description for kind in kinds if name in kind.model_fields]
        about += ["concerns no answer of this server"] if "no effect" in cells else []
        about += [
            f"taken as `{json.dumps(kind.refused[name])}`" for kind in kinds if kind.refused.get(name) is not None
        ]
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


# ---------------------------------------------------------------- long prompts, broken bodies, other hosts


@pytest.fixture
def short(tiny_folder, assistant, tmp_path):
    """A server whose model has 256 positions."""
    for file in Path(tiny_folder).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    server = ServerThread(str(tmp_path), assistant)
    yield server
    server.stop()


def test_a_prompt_that_no_positions_hold_is_refused_before_it_is_tokenized(short, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("it was tokenized")

    longest = 256 * len("<pad>")
    assert refused(short, COMPLETIONS, {"prompt": "a" * longest})[0] == 400, "this many may be tokens enough"
    monkeypatch.setattr(type(short.processor), "_encode_plus", never)
    for path, request_ in [
        (COMPLETIONS, {"prompt": "a" * (longest + 1)}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * longest}, {"role": "user", "content": "a"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * (longest + 1)}]}]}),
        (RESPONSES, {"input": "a" * longest, "instructions": "a"}),
    ]:
        status, sentence = refused(short, path, request_)
        assert status == 413 and f"{longest + 1} characters" in sentence and "256 positions" in sentence
    with pytest.raises(openai.APIStatusError, match="characters") as caught:
        short.complete("a" * 1_000_000, 5)
    assert caught.value.status_code == 413


@pytest.mark.parametrize("path", [*REQUESTS, "/live", "/v1/systemone"])
@pytest.mark.parametrize("is_told", [True, False], ids=["with its length", "in chunks"])
def test_a_body_above_the_limit_is_refused_while_it_arrives(server, path, is_told):
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    block = b" " * (1 << 20)
    blocks = (block for _ in range(gate.BODY_LIMIT // len(block) + 1))
    headers = {"content-type": "application/json"} | (
        {"content-length": str(gate.BODY_LIMIT + len(block))} if is_told else {}
    )
    try:
        connection.request("POST", path, blocks, headers, encode_chunked=not is_told)
    except (BrokenPipeError, ConnectionResetError):  # the answer is there before the body has left
        pass
    response = connection.getresponse()
    answer = json.load(response)
    connection.close()
    assert (response.status, answer["error"]["message"]) == (413, "The body is larger than 16 MiB.")
    assert answer["error"]["type"] == "invalid_request_error"


def test_health_answers_while_a_prompt_is_tokenized(server, monkeypatch):
    """The tokenizer goes on only when the server has said that it is there."""
    is_there, begun = threading.Event(), threading.Event()
    encode = type(server.processor)._encode_plus

    def slow(*args, **kwargs):
        begun.set()
        assert is_there.wait(30), "the event loop stands while a prompt is tokenized"
        return encode(*args, **kwargs)

    monkeypatch.setattr(type(server.processor), "_encode_plus", slow)

    def ask(i: int):
        if i == 0:
            assert begun.wait(30)
            health = json.loads(server.get("/health"))
            is_there.set()
            return health["status"]
        return server.complete(PROMPT, 2, stream=i == 1) if i < 3 else server.chat(PROMPT, 2)

    answers = at_once(4, ask)
    assert answers[0] == "ok" and len(list(answers[1])) > 0
    assert answers[2].usage.completion_tokens == answers[3].usage.completion_tokens == 2


OWN = {
    CHAT: b'"messages": [{"role": "user", "content": %s}]',
    RESPONSES: b'"stream": false, "input": %s',
    "/v1/systemone": b'"questions": {"a": {"type": "noul"}}, "state": %s',
}
BAD = {
    "empty": b"",
    "no JSON": b'{"prompt": ',
    "a list": b"[]",
    "a number": b"5",
    "no UTF-8": b'{"prompt":"\xff"}',
    "UTF-16": '{"prompt":"a"}'.encode("utf-16"),
    "nested": b"[" * 1000,
    "nested in a field": b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a lone surrogate": b'{"prompt": "\\ud800abc"}',
    "a lone surrogate as the model": b'{"prompt": "a", "model": "\\ud800abc"}',
    "a lone surrogate as a name": b'{"\\ud800abc": 1}',
    "not a number": b'{"prompt": "a", "temperature": NaN}',
    "a number without end": b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
    "null": b'{"prompt": null, "messages": null, "input": null}',
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("path", [*REQUESTS, "/live", "/v1/systemone"])
def test_a_bad_body_is_refused_in_openais_form(server, path, body):
    """A prompt has the name and the form that the address gives it."""
    body = re.sub(rb'"prompt": ("[^"]*")', lambda found: OWN.get(path, b'"prompt": %s') % found[1], body)
    assert 400 <= refused(server, path, body)[0] < 500


def test_what_has_no_address_or_another_method_is_refused_in_openais_form(server):
    assert refused(server, "/v1/nothing", b"{}")[0] == 404
    assert refused(server, "/v1/models", b"{}")[0] == 405
    assert refused(server, "/v1/audio/transcriptions", b"")[0] == 403
    for path in ("/nothing", CHAT, "/live", "/load_model"):
        with pytest.raises(openai.APIStatusError) as caught:
            server.client.get(f"{server.url}{path}", cast_to=object)
        assert caught.value.status_code in (404, 405) and caught.value.body["type"] == "invalid_request_error"


def status_with(server, method: str, path: str, body: bytes | None = None, **headers: str) -> int:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    connection.request(method, path, body, {"content-type": "application/json", **headers})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


@pytest.mark.parametrize("path", ["/live", *REQUESTS])
def test_a_page_of_another_name_or_site_cannot_use_the_server(server, path):
    body = {"prompt": PROMPT, "max_new_tokens": 2} if path == "/live" else {**REQUESTS[path], "stream": False}
    body = json.dumps(
        body | ({} if path == "/live" else {"max_output_tokens" if path == RESPONSES else "max_tokens": 2})
    )
    here = urlsplit(server.url)
    for host in (here.netloc, f"localhost:{here.port}", f"LOCALHOST:{here.port}", f"[::1]:{here.port}"):
        assert status_with(server, "POST", path, body, host=host) == 200
        assert status_with(server, "POST", path, body, host=host, origin=f"http://{host}") == 200
    for host in (
        "evil.example",
        f"evil.example:{here.port}",
        f"127.0.0.1.evil.example:{here.port}",
        "",
        "localhost.evil",
    ):
        assert status_with(server, "POST", path, body, host=host) == 400
        assert status_with(server, "POST", path, body, host=host, origin=f"http://{host}") == 400
        assert status_with(server, "GET", "/v1/models", host=host) == 400
    for host in ("evil.example", "[", f"[::1:{here.port}"):
        status, sentence = refused(server, path, body.encode(), host=host)
        assert status == 400 and f"not called {host}" in sentence
    for origin in ("http://evil.example", "null", f"http://localhost:{here.port + 1}", f"http://{here.netloc}.evil"):
        assert refused(server, path, body.encode(), origin=origin)[0] == 403
        assert status_with(server, "POST", path, body, origin=origin) == 403
        assert "access-control-allow-origin" not in dict(headers_of(server, origin))


def headers_of(server, origin: str) -> list[tuple[str, str]]:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    connection.request("GET", "/v1/models", headers={"origin": origin})
    response = connection.getresponse()
    response.read()
    connection.close()
    return [(name.lower(), value) for name, value in response.getheaders()]


def test_with_cors_and_names_pages_and_clients_of_these_are_served(tiny_folder, assistant):
    server = ServerThread(tiny_folder, assistant, enable_cors=True, allowed_hosts=["box.example", "*.Lab"])
    body, origin = json.dumps({"prompt": PROMPT, "max_tokens": 2}), "http://page.example"
    try:
        assert status_with(server, "POST", COMPLETIONS, body, origin=origin, host="box.example:80") == 200
        assert status_with(server, "POST", COMPLETIONS, body, host="my.lab") == 200
        assert status_with(server, "POST", COMPLETIONS, body, host="evil.example") == 400
        assert dict(headers_of(server, origin))["access-control-allow-origin"] == "*"
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
        assert status_with(server, "OPTIONS", COMPLETIONS, origin=origin, **asks) == 200
    finally:
        server.stop()


def test_the_names_by_which_a_server_may_be_called():
    assert {"localhost", "127.0.0.1", "::1"} <= set(hosts("127.0.0.1", [])) == set(hosts("localhost", []))
    assert "127.0.0.2" in hosts("127.0.0.2", []) and "*" not in hosts("::1", [])
    assert hosts("0.0.0.0", []) == hosts("::", []) == hosts("box.example", []) == ["*"]
    assert "*" not in hosts("0.0.0.0", ["box.example"]) and "box.example" in hosts("0.0.0.0", ["box.example"])
