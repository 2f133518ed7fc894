"""A text of the server ends before its stop string, as OpenAI's does, whole and streamed."""

import json

import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ssd.serving.stops import Cut, StopCriteria, StreamCut, cut_answer

from .. import vocabularies
from ..serving.conftest import tiny_folder, tiny_server  # noqa: F401

PROMPT = "abcdefgh"
COUNT = 40


@pytest.fixture
def server(tiny_server):  # noqa: F811
    return tiny_server


def answer(server, ask: str, is_streamed: bool, tokens: int = COUNT, **options) -> tuple[str, str, int]:
    """Returns the text of an answer, why it ended, and how many tokens it had."""
    found = getattr(server, ask)(PROMPT, tokens, stream=is_streamed or openai.omit, **options)
    chunks = list(found) if is_streamed else [found]
    choices = [chunk.choices[0] for chunk in chunks]
    texts = [one.text if ask == "complete" else (one.delta if is_streamed else one.message).content for one in choices]
    assert [one.finish_reason for one in choices[:-1]] == [None] * (len(choices) - 1)
    return "".join(filter(None, texts)), choices[-1].finish_reason, chunks[-1].usage.completion_tokens


def lengths(server, text: str, ask: str, **options) -> list[int]:
    """Returns how long the text is after each of its tokens."""
    return [len(answer(server, ask, False, count, **options)[0]) for count in range(1, COUNT + 1)]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_a_text_ends_before_its_stop_string(server, ask, is_streamed):
    """Stop strings of several lengths, which begin and end anywhere in tokens."""
    text, reason, count = answer(server, ask, is_streamed)
    assert reason == "length" and count == COUNT
    ends, before = lengths(server, text, ask), server.figures()
    for start in range(0, 40, 7):
        for length in (1, 2, 5, 9):
            stop = text[start : start + length]
            first = text.index(stop)
            expected = text[:first], "stop", 1 + next(i for i, end in enumerate(ends) if end >= first + length)
            assert answer(server, ask, is_streamed, stop=stop) == expected
            assert answer(server, ask, is_streamed, stop=["no such", stop, text[-3:]]) == expected
    after = server.figures()
    tokens, rounds = (after[name] - before[name] for name in ("tokens_total", "rounds_total"))
    assert rounds < 0.7 * tokens, "a round is to bring several tokens"
    assert after["hits_total"] > before["hits_total"]
