"""What the options of `hf-ssd serve`, and a draft with another tokenizer, change for its clients."""

import dataclasses
import json

import openai
import pytest
import requests
from transformers import AutoModelForCausalLM

import hf_ssd
from hf_ssd.cache import packed
from hf_ssd.cli.models import Model

from ..helpers import vocabularies
from ..helpers.servers import LONG, PROMPT, ServerThread

PLAN = hf_ssd.SSDConfig(lookahead=3, budget=4)
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def limited(tiny_folder, assistant):
    options = {"name": "small", "key": "secret", "api_key": "secret", "max_tokens": 5}
    with ServerThread(tiny_folder, assistant, PLAN, **options) as server:
        yield server


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
        assert requests.get(limited.url + path).status_code == 401
    assert "<title>" in limited.get("/") and json.loads(limited.get("/health"))["status"] == "ok"


def test_no_answer_has_more_tokens_than_the_server_allows(limited):
    assert limited.complete("abc", 100).usage.completion_tokens == 5
    assert limited.complete("abc", 3).usage.completion_tokens == 3
    answer = limited.client.chat.completions.create(model="small", messages=MESSAGES, temperature=0)
    assert answer.usage.completion_tokens == 5 and answer.choices[0].finish_reason == "length"
    events = limited.live(prompt="abc", max_new_tokens=100)
    assert [event["count"] for event in events if "count" in event][-1] == 5


def test_decisions_know_every_name_of_the_model(limited):
    pytest.importorskip("transformers.cli.serving.systemone")
    question = {"type": "noul", "instructions": "a"}
    body = {"state": "abc", "questions": {"first": question}}
    said = []
    for name in ("small", limited.model, None, "other"):
        asked = {**body, **({"model": name} if name else {})}
        said.append(limited.post("/v1/systemone", json.dumps(asked).encode(), authorization="Bearer secret"))
    assert said[0] == said[1] == said[2] and "one model" not in str(said[0])
    assert said[3][0] == 400 and "one model, small; the request names other" in said[3][1]["error"]["message"]


@pytest.mark.slow
def test_a_server_keeps_no_second_copy_of_packed_weights_and_compares_with_plain(tiny_folder, assistant, monkeypatch):
    def owned(model, load=Model.load_for_requests):
        found = load(model)
        packed.own(found[0])
        return found

    monkeypatch.setattr(Model, "load_for_requests", owned)
    config, plain = dataclasses.replace(PLAN, pack_weights=True), AutoModelForCausalLM.from_pretrained(tiny_folder)
    with ServerThread(tiny_folder, assistant, config) as server:
        texts = []
        for draft in (True, False):
            events = server.live(prompt=PROMPT, max_new_tokens=COUNT, draft=draft)
            texts.append("".join(text for event in events for text, _ in event.get("tokens", ())))
        answer = server.complete(PROMPT, COUNT).choices[0].text
        assert server.figures()["accepted_total"] > 0
    assert server.loaded_model.lm_head.weight.isnan().all()
    ids = server.processor(PROMPT, return_tensors="pt").input_ids
    tokens = plain.generate(ids, max_new_tokens=COUNT, do_sample=False)[0, ids.shape[1] :]
    assert answer == server.processor.decode(tokens, skip_special_tokens=True) and texts[0] == texts[1] != ""


# ---------------------------------------------------------------- a draft with another tokenizer

COUNT = 40
DRAFT = [*reversed(vocabularies.TARGET)]  # the same tokens under other ids


@pytest.mark.slow
def test_a_server_speculates_with_a_draft_of_another_tokenizer(tiny_folder):
    draft = vocabularies.renamed_draft(DRAFT, max_position_embeddings=LONG)
    names = {"tokenizer": vocabularies.TARGET, "assistant_tokenizer": DRAFT}
    tokenizers = {name: vocabularies.tokenizer(tokens) for name, tokens in names.items()}
    with hf_ssd.launch_draft(draft, num_threads=1) as assistant:
        with ServerThread(tiny_folder, assistant, PLAN, tokenizers) as server:
            answers = [server.complete(PROMPT, COUNT), *server.complete(PROMPT, COUNT, stream=True)]
            figures = server.figures()
    inputs = server.processor(PROMPT, return_tensors="pt", return_token_type_ids=False)
    output = server.loaded_model.generate(**inputs, max_new_tokens=COUNT, do_sample=False, ssd_config=None)
    expected = server.processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    first, *texts = [answer.choices[0].text for answer in answers]
    assert first == "".join(texts) == expected
    assert figures["tokens_total"] == 2 * COUNT and 0 < figures["rounds_total"] < 1.4 * COUNT
    assert figures["accepted_total"] > 20 and figures["hits_total"] > 10
