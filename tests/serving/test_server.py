"""The endpoint, asked by OpenAI's own client."""

import functools
import re
from collections import Counter
from pathlib import Path

import openai
import psutil
import pytest
from transformers import LogitsProcessor

from ..helpers.channels import both
from ..helpers.servers import within

PROMPT = "import os\n\ndef main("
CHAT = [{"role": "user", "content": PROMPT}]


def test_completions_are_those_of_plain_generation(program, plain):
    before = program.figures()
    answer = program.complete(PROMPT, 60)
    assert answer.choices[0].text == plain(PROMPT, 60)
    assert answer.usage.completion_tokens == 60 and answer.choices[0].finish_reason == "length"
    chunks = [chunk.choices[0].text for chunk in program.complete(PROMPT, 60, stream=True)]
    assert "".join(chunks) == plain(PROMPT, 60) and len(chunks) > 20
    gained = program.gained(before)
    assert gained["tokens_total"] == 120 and gained["finished"] == 2
    assert gained["rounds_total"] < 100, "nothing was drafted"
    assert gained["accepted_total"] > 0 and gained["hits_total"] > 0


def test_chat_completions_and_responses(program, plain):
    expected = plain(PROMPT, 30)
    ask = {"model": program.model, "temperature": 0}
    answer = program.client.chat.completions.create(messages=CHAT, max_completion_tokens=30, **ask)
    assert answer.choices[0].message.content == expected
    stream = program.client.chat.completions.create(messages=CHAT, max_completion_tokens=30, stream=True, **ask)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected
    response = program.client.responses.create(input=CHAT, max_output_tokens=30, **ask)
    assert response.output_text == expected


class Counted(LogitsProcessor):
    """OpenAI's formula, one token after the other."""

    def __init__(self, prompt: str, frequency: float, presence: float, tokenizer):
        self.length, self.penalties = len(tokenizer(prompt)["input_ids"]), (frequency, presence)

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for token, count in Counter(input_ids[0, self.length :].tolist()).items():
            scores[0, token] -= self.penalties[0] * count + self.penalties[1]
        return scores


@pytest.mark.parametrize("frequency, presence", [(0.6, 0.0), (0.0, 1.5), (-0.1, -0.1)])
def test_penalties_are_openais(program, plain, frequency, presence):
    before, counted = program.figures(), Counted(PROMPT, frequency, presence, plain.tokenizer)
    answer = program.complete(PROMPT, 40, frequency_penalty=frequency, presence_penalty=presence)
    assert answer.choices[0].text == plain(PROMPT, 40, logits_processor=[counted]) != plain(PROMPT, 40)
    assert program.gained(before)["accepted_total"] > 0


def test_the_client_of_the_document_runs(program, capsys):
    document = Path(__file__).parents[2] / "docs" / "serving.md"
    (code,) = re.findall(r'^```python title="client"\n(.*?)^```$', document.read_text(), re.MULTILINE | re.DOTALL)
    address, before = "http://127.0.0.1:8000", program.figures()
    assert address in code
    exec(code.replace(address, program.url), {})
    gained = program.gained(before)
    assert gained["finished"] == 2 and gained["tokens_total"] == 128
    assert len(capsys.readouterr().out.split()) > 10


def test_the_figures_agree_with_each_other(program):
    program.complete(PROMPT, 40)
    figures = program.figures()
    assert figures["acceptance_rate"] == pytest.approx(figures["accepted_total"] / figures["tested_total"])
    assert figures["hit_rate"] == pytest.approx(figures["hits_total"] / figures["drafted_total"])
    assert 1 < figures["tokens_per_round"] <= 4 and figures["verify_seconds_total"] > 0
    assert figures["draft_ready"] == 1 and program.draft_state == "ready"


@pytest.mark.slow
def test_sixteen_clients_at_once(program, plain):
    def ask(prompt: str) -> str:
        if len(prompt) % 2:
            return program.complete(prompt, 8).choices[0].text
        return "".join(chunk.choices[0].text for chunk in program.complete(prompt, 8, stream=True))

    prompts = [f"def test_{i}(self):\n" for i in range(16)]
    texts = both(*(functools.partial(ask, prompt) for prompt in prompts))
    assert texts == [plain(prompt, 8) for prompt in prompts]


def test_what_cannot_be_served_gets_a_sentence(program):
    before = program.figures()
    with pytest.raises(openai.BadRequestError, match="The prompt has 3001 tokens; the model takes fewer than 2048"):
        program.complete("a b " * 1500, 5)
    with pytest.raises(openai.BadRequestError, match="takes fewer than"):
        program.complete("a b " * 1500, 5, stream=True)
    with pytest.raises(openai.BadRequestError, match="The prompt is empty"):
        program.complete("", 5)
    assert program.gained(before)["refused"] == 3
    for path, body, status in [("/live", b'{"prompt": ""}', 400), ("/reset", b"", 403), ("/load_model", b"{}", 403)]:
        assert program.post(path, body)[0] == status
    assert program.complete(PROMPT, 5).usage.completion_tokens == 5


def test_a_text_ends_where_the_positions_do(program):
    answer = program.complete("a b " * 1010, 500)
    assert answer.usage.total_tokens == 2048


@pytest.mark.slow
def test_a_worker_that_dies_in_mid_stream_costs_no_token(program, plain):
    before = program.figures()
    stream, texts = iter(program.complete(PROMPT, 300, stream=True)), []
    for chunk in stream:
        texts.append(chunk.choices[0].text)
        if len(texts) == 20:
            program.worker().kill()
    assert "".join(texts) == plain(PROMPT, 300)
    assert program.draft_state == "ended"
    assert program.complete(PROMPT, 10).choices[0].text == plain(PROMPT, 10)
    assert program.gained(before)["draft_restarts_total"] == 1
    assert within(60, lambda: program.draft_state == "ready")


@pytest.mark.slow
def test_many_requests_leave_nothing_behind(program):
    def held() -> list[int]:
        processes = [psutil.Process(program.process.pid), program.worker()]
        return [process.num_fds() for process in processes] + [process.memory_info().rss for process in processes]

    def ask(count: int) -> None:
        for turn in range(count):
            if turn % 3 == 0:
                assert sum(1 for _ in program.complete(PROMPT, 4, stream=True)) > 1
            else:
                assert program.complete(PROMPT, 4, temperature=turn % 2).usage.completion_tokens == 4

    assert within(60, lambda: program.draft_state == "ready")
    ask(60)
    before = held()
    ask(300)
    after = held()
    assert after[0] <= before[0] + 2 and after[1] <= before[1] + 2
    assert after[2] - before[2] < 8 << 20 and after[3] - before[3] < 4 << 20
