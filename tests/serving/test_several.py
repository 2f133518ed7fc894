"""Several requests at a time: each begins at once, and has the answer that it has alone."""

import threading
import time

import openai
import pytest

import hf_ssd
from hf_ssd.generation import continuous

from ..helpers.servers import LONG, PROMPT, ServerThread

PROMPTS = ("abc", "stuvw", "xyzabc")


class Reader(threading.Thread):
    """Reads a stream, and keeps when its first and last pieces came."""

    def __init__(self, server, prompt, tokens, **options):
        super().__init__(daemon=True)
        self.stream = lambda: server.complete(prompt, tokens, stream=True, **options)
        self.text, self.first, self.last = "", None, None
        self.start()

    def begun(self) -> "Reader":
        while self.first is None:
            time.sleep(0.005)
        return self

    def run(self):
        for chunk in self.stream():
            self.first = self.first or time.monotonic()
            self.text += chunk.choices[0].text if chunk.choices else ""
        self.last = time.monotonic()


@pytest.mark.slow
def test_short_answers_begin_and_end_while_a_long_one_runs(program):
    long_text = program.complete(PROMPT, 300).choices[0].text
    alone = [program.complete(prompt, 10).choices[0].text for prompt in PROMPTS]
    long = Reader(program, PROMPT, 300).begun()
    short = [Reader(program, prompt, 10) for prompt in PROMPTS]
    for reader in short:
        reader.join(60)
    assert long.last is None, "all short ones have ended before it"
    long.join(60)
    assert [reader.text for reader in short] == alone and long.text == long_text


@pytest.mark.slow
def test_the_figures_say_who_runs_and_who_waits(program):
    before = program.figures()
    reader = Reader(program, PROMPT, 200).begun()
    now = program.figures()
    assert now["num_requests_running"] == 1 and now["num_requests_waiting"] == 0
    reader.join(60)
    gained = program.gained(before)
    assert program.figures()["num_requests_running"] == 0 and gained["hits_total"] > 0
    assert gained["time_to_first_token_seconds_count"] == 1
    assert 50 < gained["time_per_output_token_seconds_count"] < 200 and gained["time_per_output_token_seconds_sum"] > 0


@pytest.fixture
def one_place(server, monkeypatch):
    """The batch of a server with a single place, for which one request may wait."""
    batch = server.served.server.calls.batch
    monkeypatch.setattr(batch.rows, "count", 1)
    monkeypatch.setattr(batch, "max_rows", 1)
    monkeypatch.setattr(batch, "max_waiting", 1)
    return batch


def is_told_to_come_again(server, *request, **options):
    with pytest.raises(openai.InternalServerError, match="Too many requests wait") as error:
        server.complete(*request, **options)
    return error.value.status_code == 503 and error.value.response.headers["retry-after"] == "5"


def test_too_many_requests_are_told_to_come_again(server, one_place):
    readers = [Reader(server, PROMPT, LONG // 80).begun(), Reader(server, "abc", 5)]
    while not one_place.rows.waiting:
        time.sleep(0.005)
    assert is_told_to_come_again(server, "abc", 5)
    for reader in readers:
        reader.join(120)
        assert reader.last is not None


def test_a_model_whose_rows_cannot_join_is_served_in_turn(tiny_folder, assistant, monkeypatch):
    def refuse(*_):
        raise ValueError("not these")

    monkeypatch.setattr(continuous, "check_joining", refuse)
    with ServerThread(tiny_folder, assistant, hf_ssd.SSDConfig(lookahead=3, budget=4)) as other:
        assert other.served.why_in_turn == "not these" and other.served.server.calls.batch is None
        readers = [Reader(other, PROMPT, 10) for _ in range(2)]
        for reader in readers:
            reader.join(60)
        assert readers[0].text == readers[1].text and readers[0].last is not None


def test_the_next_turn_of_a_chat_is_not_read_again(program, plain):
    """Whole or streamed, with one choice or several, and in a chat; `usage` and the figures say how much was known."""
    text = "def walk(folder, names):\n    for name in names:\n        yield folder, name\n\n\n" * 4
    first = program.complete(text, 8)
    before, text = program.figures(), text + first.choices[0].text
    second = program.complete(text, 8)
    known = second.usage.prompt_tokens_details.cached_tokens
    assert 0.9 * first.usage.prompt_tokens < known < second.usage.prompt_tokens
    assert program.gained(before)["prefix_cache_hits_total"] == known
    assert second.choices[0].text == plain(text, 8)
    several = program.complete(text, 8, n=2, temperature=1.0, seed=3)
    chunks = list(program.complete(text, 8, n=2, temperature=1.0, seed=3, stream=True))
    least = 0.9 * several.usage.prompt_tokens
    for usage in (several.usage, chunks[-1].usage, program.chat(text, 4).usage):
        assert least < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    status, answer = program.request("/v1/responses", input=text, max_output_tokens=4)
    details = answer["usage"]["input_tokens_details"]
    assert status == 200 and least < details["cached_tokens"] < answer["usage"]["input_tokens"]


def test_an_answer_of_more_choices_than_may_wait_is_refused_as_well(server, one_place):
    before = server.figures()
    assert is_told_to_come_again(server, PROMPT, LONG // 80, n=4, temperature=1.0)
    assert server.gained(before)["refused"] == 1
    while any(server.figures()[f"num_requests_{state}"] for state in ("running", "waiting")):
        time.sleep(0.005)
    assert server.complete("abc", 5).choices  # the rows that had joined are gone
