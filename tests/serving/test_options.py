"""What the options of `hf-ssd serve` change for its clients."""

import json
import urllib.error
import urllib.request

import openai
import pytest

import hf_ssd

from ..helpers import vocabularies
from ..helpers.servers import ServerThread
from ..helpers.tiny import tiny_draft

PLAN = hf_ssd.SSDConfig(lookahead=3, budget=4)
MESSAGES = [{"role": "user", "content": "abcdefgh"}]


@pytest.fixture(scope="module")
def limited(tiny_folder, assistant):
    server = ServerThread(tiny_folder, assistant, PLAN, name="small", key="secret", api_key="secret", max_tokens=5)
    yield server
    server.stop()


def test_only_clients_with_the_key_are_served(limited):
    assert limited.complete("abc", 2).usage.completion_tokens == 2
    for key in ("secre", "Secret", "secret2", "none"):
        client = openai.OpenAI(base_url=f"{limited.url}/v1", api_key=key, max_retries=0)
        with pytest.raises(openai.AuthenticationError, match="has not the key of this server"):
            client.completions.create(model="small", prompt="abc", max_tokens=2)
    for path in ("/live", "/v1/chat/completions", "/v1/responses", "/v1/systemone", "/reset"):
        status, answer = limited.post(path, b"{}")
        assert status == 401 and "--api-key" in answer["error"]["message"]
    for path in ("/metrics", "/v1/models", "/docs", "/openapi.json"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            limited.get(path)
    assert "<title>" in limited.get("/") and json.loads(limited.get("/health"))["status"] == "ok"


def test_no_answer_has_more_tokens_than_the_server_allows(limited):
    assert limited.complete("abc", 100).usage.completion_tokens == 5
    assert limited.complete("abc", 3).usage.completion_tokens == 3
    answer = limited.client.chat.completions.create(model="small", messages=MESSAGES, temperature=0)
    assert answer.usage.completion_tokens == 5 and answer.choices[0].finish_reason == "length"
    body, headers = b'{"prompt": "abc", "max_new_tokens": 100}', {"authorization": "Bearer secret"}
    request = urllib.request.Request(limited.url + "/live", body, headers)
    with urllib.request.urlopen(request, timeout=20) as response:
        events = [json.loads(line.removeprefix(b"data: ")) for line in response if line.strip()]
    assert [event["count"] for event in events if "count" in event][-1] == 5


def test_decisions_know_every_name_of_the_model(tiny_server, limited):
    pytest.importorskip("transformers.cli.serving.systemone")
    question = {"type": "noul", "instructions": "a"}
    body = {"state": "abc", "questions": {"first": question}}
    said = []
    for name in ("small", limited.model, None, "other"):
        asked = {**body, **({"model": name} if name else {})}
        said.append(limited.post("/v1/systemone", json.dumps(asked).encode(), authorization="Bearer secret"))
    assert said[0] == said[1] == said[2] and "one model" not in str(said[0])
    assert said[3][0] == 400 and "one model, small; the request names other" in said[3][1]["error"]["message"]


def test_a_prompt_that_the_draft_hardly_knows_is_answered(tiny_folder, caplog):
    few = [token for token in vocabularies.TARGET if token not in "pqrs"]
    tokenizers = {"tokenizer": vocabularies.tokenizer(vocabularies.TARGET)}
    tokenizers["assistant_tokenizer"] = vocabularies.tokenizer(few)
    draft = tiny_draft(vocab_size=len(few), max_position_embeddings=20_000)
    server = ServerThread(tiny_folder, draft, hf_ssd.SSDConfig(asynchronous=False), tokenizers)
    try:
        assert server.complete("pqrs", 6).usage.completion_tokens == 6
        assert server.complete("abcdefgh", 6).usage.completion_tokens == 6
    finally:
        server.stop()
    warnings = [record.message for record in caplog.records if "Finishing without the draft" in record.message]
    assert len(warnings) == 1 and "has 0 of the 4 tokens that the prompts use" in warnings[0]
