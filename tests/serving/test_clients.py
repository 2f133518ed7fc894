"""Other programs as clients of a server: openai, litellm, langchain-openai, openai-agents and lm-eval."""

import asyncio
import shutil

import openai
import pytest
import torch

import hf_ssd

from ..helpers.servers import ServerThread
from .test_answers import CALL, caller_folder, says  # noqa: F401

pytestmark = pytest.mark.slow
PROMPT = "import os\nimport sys\nimport os\nimport sys\nimport os\n"  # n-grams guess what follows
QUESTION = [{"role": "user", "content": PROMPT}]
COUNT = 24


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = caller_folder(tmp_path_factory)
    with ServerThread(folder, None, hf_ssd.SSDConfig(drafter="ngram", lookahead=4)) as server:
        yield server
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def nothing_fails(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    before = server.figures()
    yield
    gained = server.gained(before)
    assert gained["failed"] == gained["refused"] == 0


@pytest.fixture
def text(server) -> str:
    """Returns the text of a chat's answer. The parser of answers strips it unless it streams."""
    return server.chat(PROMPT, COUNT).choices[0].message.content.strip()


def completions(server, *prompts: str, **options) -> list[str]:
    return [server.complete(prompt, COUNT, **options).choices[0].text for prompt in prompts]


def test_the_answers_speculate(server):
    before = server.figures()
    server.complete(PROMPT, COUNT)
    assert server.gained(before)["accepted_total"] > 0


def test_openai_reads_a_response_and_its_stream(server, text):
    ask = {"model": server.model, "input": PROMPT, "max_output_tokens": COUNT, "temperature": 0}
    assert server.client.responses.create(**ask).output_text == text
    with server.client.responses.stream(**ask) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta").strip() == text


def test_litellm(server, text):
    litellm = pytest.importorskip("litellm")
    ask = {"model": f"openai/{server.model}", "api_base": f"{server.url}/v1", "api_key": "none", "temperature": 0}
    answer = litellm.completion(messages=QUESTION, max_tokens=COUNT, **ask)
    assert answer.choices[0].message.content == text and answer.usage.completion_tokens == COUNT
    chunks = litellm.completion(messages=QUESTION, max_tokens=COUNT, stream=True, **ask)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks).strip() == text
    texts = litellm.text_completion(prompt=[PROMPT, "def f("], max_tokens=COUNT, **ask)
    assert [choice.text for choice in texts.choices] == completions(server, PROMPT, "def f(")


def test_langchain_chats_streams_and_calls_tools(server, text, says):  # noqa: F811
    langchain = pytest.importorskip("langchain_openai")
    options = {"base_url": f"{server.url}/v1", "api_key": "none", "temperature": 0, "max_tokens": COUNT}
    model = langchain.ChatOpenAI(model=server.model, **options)
    assert model.invoke(PROMPT).content == text
    assert "".join(chunk.content for chunk in model.stream(PROMPT)).strip() == text
    found = langchain.OpenAI(model=server.model, **options).generate([PROMPT, "def f("]).generations
    assert [one[0].text for one in found] == completions(server, PROMPT, "def f(")
    tool = {"name": "f", "description": "Does something.", "parameters": {"type": "object", "properties": {}}}
    says(CALL)
    answer = model.bind(max_tokens=200).bind_tools([tool]).invoke(PROMPT)
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("f", {"a": 1})]


def test_agents_answer_and_call_tools(server, text, says):  # noqa: F811
    """With openai-agents' default model, which asks /v1/responses, and with its model for chat completions."""
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    asked = []

    @agents.function_tool
    def f(a: int) -> str:
        """Does something."""
        asked.append(a)
        says("Done.")
        return "seven"

    async def run() -> None:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        settings = agents.ModelSettings(temperature=0, max_tokens=COUNT)
        for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
            model = kind(server.model, client)
            agent = agents.Agent("one", model=model, model_settings=settings)
            assert (await agents.Runner.run(agent, PROMPT)).final_output == text
            streamed = agents.Runner.run_streamed(agent, PROMPT)
            async for _ in streamed.stream_events():
                pass
            assert streamed.final_output.strip() == text
        for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
            settings = agents.ModelSettings(temperature=0, max_tokens=200)
            agent = agents.Agent("two", model=kind(server.model, client), model_settings=settings, tools=[f])
            says(CALL)
            assert (await agents.Runner.run(agent, PROMPT)).final_output == "Done."
        await client.close()

    asyncio.run(run())
    assert asked == [1, 1]


@pytest.mark.parametrize("are_tokens", [True, False], ids=["tokens", "texts"])
def test_lm_eval_sends_several_prompts_at_once(server, are_tokens):
    models = pytest.importorskip("lm_eval.models.openai_completions")
    from lm_eval.api.instance import Instance

    options = {"batch_size": 3, "tokenized_requests": are_tokens, "max_retries": 1}
    names = {"model": server.model, "tokenizer": server.model}
    model = models.LocalCompletionsAPI(f"{server.url}/v1/completions", "huggingface", **names, **options)
    prompts = [PROMPT, "def f(", "class A", "import re\n"]
    options = {"until": ["\n\n\n"], "max_gen_toks": COUNT}
    texts = model.generate_until([Instance("generate_until", {}, (prompt, dict(options)), 0) for prompt in prompts])
    assert texts == completions(server, *prompts, stop=["\n\n\n"])


def test_lm_eval_scores_continuations(server):
    """With the log-probabilities of the prompt, which it sends as tokens."""
    models = pytest.importorskip("lm_eval.models.openai_completions")
    from lm_eval.api.instance import Instance

    names = {"model": server.model, "tokenizer": server.model}
    model = models.LocalCompletionsAPI(f"{server.url}/v1/completions", "huggingface", **names, max_retries=1)
    pairs = [(PROMPT.rstrip(), "\nimport sys\n"), (PROMPT.rstrip(), " zebra"), ("def f(", "self):\n")]
    found = model.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
    for (context, continuation), (score, is_greedy) in zip(pairs, found):
        ids = server.processor(context + continuation, return_tensors="pt")["input_ids"]
        start = len(server.processor(context)["input_ids"])
        with torch.no_grad():
            scores = server.loaded_model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        assert score == pytest.approx(scores.gather(1, ids[0, start:, None]).sum().item(), abs=1e-3)
        assert is_greedy == (scores.argmax(-1) == ids[0, start:]).all()
