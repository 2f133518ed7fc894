"""What clients of the server do: they send seeds, long prompts and broken bodies, leave, and call it by other names."""

import contextlib
import functools
import http.client
import json
import re
import shutil
import socket
import threading
from urllib.parse import urlsplit

import openai
import pytest
import requests
import torch

from hf_ssd.serving import gate
from hf_ssd.serving.server import hosts

from ..helpers.channels import both
from ..helpers.servers import CHAT, COMPLETIONS, LONG, PROMPT, REQUESTS, RESPONSES, ServerThread, said, within
from ..helpers.tiny import tiny_model


def refused(server, path: str, body: dict | bytes, **headers) -> tuple[int, str]:
    """Returns status and sentence of a refusal, which has OpenAI's form."""
    body = body if isinstance(body, bytes) else json.dumps({**REQUESTS[path], **body}).encode()
    status, answer = server.post(path, body, **headers)
    assert status >= 400, answer
    return status, server.sentence(status, answer)


# ---------------------------------------------------------------- sampling and seeds


@pytest.mark.slow
@pytest.mark.parametrize("ask", ["chat", "complete"])
def test_a_positive_temperature_samples(server, ask):
    def text(**options) -> str:
        return said(server.chunks(ask, PROMPT, 12, False, **options))[0].text

    greedy = text(temperature=0)
    assert len({text(temperature=1.5) for _ in range(4)}) > 1
    assert len({text(temperature=openai.omit, top_p=0.9) for _ in range(4)}) > 1
    assert text(temperature=0, top_p=0.9) == text(temperature=openai.omit) == greedy


def test_requests_with_one_seed_give_one_text_although_others_are_between(server):
    def ask(i: int) -> str:
        seed = 5 if i % 2 else openai.omit
        return server.complete(PROMPT, 12, temperature=1.0, seed=seed).choices[0].text

    alone = ask(1)
    texts = both(*(functools.partial(ask, i) for i in range(8)))
    assert set(texts[1::2]) == {alone}
    assert len(set(texts[0::2])) > 1
    state = torch.get_rng_state()
    assert ask(1) == alone
    assert torch.equal(torch.get_rng_state(), state), "a seed moved on the generator of the others"


# ---------------------------------------------------------------- clients that leave


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
    assert within(30, lambda: server.gained(before)["tokens_total"] > 10)
    for connection in connections:
        if stream:
            connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
    assert server.complete(PROMPT, 3).usage.completion_tokens == 3
    assert within(10, lambda: server.gained(before)["cancelled"] == 3)
    gained = server.gained(before)
    assert gained["finished"] == 1 and gained["tokens_total"] < LONG / 2


# ---------------------------------------------------------------- errors, long prompts, broken bodies, other hosts


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_an_error_once_the_answer_has_begun_is_the_servers_and_reaches_openais_client(server, ask, kind, monkeypatch):
    def fail(streamer, **kwargs):
        streamer.put(torch.tensor([[5]]))
        streamer.put(torch.tensor([5]))
        raise kind('No "memory"\nis left.')

    monkeypatch.setattr(server.loaded_model, "generate", fail)
    for choices in (1, 3):
        with pytest.raises(openai.APIError) as caught:
            list(getattr(server, ask)(PROMPT, 5, stream=True, n=choices))
        assert caught.value.message == 'No "memory"\nis left.' and caught.value.type == "server_error"
        with pytest.raises(openai.InternalServerError, match="is left"):
            getattr(server, ask)(PROMPT, 5, n=choices)
    body = {**REQUESTS[COMPLETIONS], "n": 3, "stream": True}
    written = requests.post(server.url + COMPLETIONS, json=body, timeout=60).text
    assert written.count('"server_error"') == 1, "the error of several choices is said once"


@pytest.fixture
def short(tiny_folder, assistant, tmp_path):
    """A server whose model has 256 positions."""
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    tiny_model(max_position_embeddings=256).save_pretrained(tmp_path)
    with ServerThread(str(tmp_path), assistant) as server:
        yield server


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
    block, count = b" " * (1 << 20), gate.BODY_LIMIT // (1 << 20) + 1
    length = {"content-length": str(count * len(block))} if is_told else {}
    headers = {"content-type": "application/json", **length}
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the answer is there before the body has left
        connection.request("POST", path, (block for _ in range(count)), headers, encode_chunked=not is_told)
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

    def health() -> str:
        assert begun.wait(30)
        status = json.loads(server.get("/health"))["status"]
        is_there.set()
        return status

    asks = [lambda: server.complete(PROMPT, 2), lambda: server.chat(PROMPT, 2)]
    status, streamed, *answers = both(health, lambda: list(server.complete(PROMPT, 2, stream=True)), *asks)
    assert status == "ok" and len(streamed) > 0
    assert [answer.usage.completion_tokens for answer in answers] == [2, 2]


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


@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_is_refused_in_openais_form(server, name):
    """A prompt has the name and the form that the address gives it."""
    for path in (*REQUESTS, "/live", "/v1/systemone"):
        body = re.sub(rb'"prompt": ("[^"]*")', lambda found: OWN.get(path, b'"prompt": %s') % found[1], BAD[name])  # noqa: B023
        assert 400 <= refused(server, path, body)[0] < 500, path


def test_what_has_no_address_or_another_method_is_refused_in_openais_form(server):
    assert refused(server, "/v1/nothing", b"{}")[0] == 404
    assert refused(server, "/v1/models", b"{}")[0] == 405
    assert refused(server, "/v1/audio/transcriptions", b"")[0] == 403
    for path in ("/nothing", CHAT, "/live", "/load_model"):
        with pytest.raises(openai.APIStatusError) as caught:
            server.client.get(f"{server.url}{path}", cast_to=object)
        assert caught.value.status_code in (404, 405) and caught.value.body["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/live", *REQUESTS])
def test_a_page_of_another_name_or_site_cannot_use_the_server(server, path):
    body = json.dumps({"prompt": PROMPT, "max_new_tokens": 2} if path == "/live" else REQUESTS[path]).encode()
    here = urlsplit(server.url)

    def answered(host: str, **headers: str) -> requests.Response:
        headers = {"content-type": "application/json", "host": host, **headers}
        return requests.post(server.url + path, data=body, headers=headers, timeout=60)

    for host in (here.netloc, f"localhost:{here.port}", f"LOCALHOST:{here.port}", f"[::1]:{here.port}"):
        assert answered(host).status_code == answered(host, origin=f"http://{host}").status_code == 200
    foreign = ["evil.example", f"127.0.0.1.evil.example:{here.port}", "", "localhost.evil", "[", f"[::1:{here.port}"]
    for host in foreign:
        for refusal in (answered(host), answered(host, origin=f"http://{host}")):
            assert refusal.status_code == 400 and f"not called {host}" in refusal.json()["error"]["message"]
        assert requests.get(f"{server.url}/v1/models", headers={"host": host}).status_code == 400
    for origin in ("http://evil.example", "null", f"http://localhost:{here.port + 1}", f"http://{here.netloc}.evil"):
        assert refused(server, path, body, origin=origin)[0] == 403
        found = requests.get(f"{server.url}/v1/models", headers={"origin": origin})
        assert "access-control-allow-origin" not in found.headers


def test_with_cors_and_names_pages_and_clients_of_these_are_served(tiny_folder, assistant):
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    with ServerThread(tiny_folder, assistant, enable_cors=True, allowed_hosts=["box.example", "*.Lab"]) as server:
        origin, url = "http://page.example", server.url + COMPLETIONS
        for host, status in [("box.example:80", 200), ("my.lab", 200), ("evil.example", 400)]:
            found = requests.post(url, json=REQUESTS[COMPLETIONS], headers={"origin": origin, "host": host}, timeout=60)
            assert found.status_code == status
        found = requests.get(f"{server.url}/v1/models", headers={"origin": origin})
        assert found.headers["access-control-allow-origin"] == "*"
        assert requests.options(url, headers={"origin": origin, **asks}).status_code == 200


def test_the_names_by_which_a_server_may_be_called():
    assert {"localhost", "127.0.0.1", "::1"} <= set(hosts("127.0.0.1", [])) == set(hosts("localhost", []))
    assert "127.0.0.2" in hosts("127.0.0.2", []) and "*" not in hosts("::1", [])
    assert hosts("0.0.0.0", []) == hosts("::", []) == hosts("box.example", []) == ["*"]
    assert "*" not in hosts("0.0.0.0", ["box.example"]) and "box.example" in hosts("0.0.0.0", ["box.example"])
