"""A text of the server ends before its stop string, as OpenAI's does, whole and streamed."""

from types import SimpleNamespace

import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ssd.serving.parameters import ChatRequest
from hf_ssd.serving.rows import Choice, Row, StopCriteria
from hf_ssd.serving.stops import Cut

from ..helpers import vocabularies
from ..helpers.servers import PROMPT
from ..helpers.suites import slowly

COUNT = 40


def answer(server, ask: str, is_streamed: bool, **options) -> tuple[list[str], str, int]:
    """Returns the texts of an answer, why it ended, and how many tokens it had."""
    found = getattr(server, ask)(PROMPT, options.pop("tokens", COUNT), stream=is_streamed or openai.omit, **options)
    chunks = list(found) if is_streamed else [found]
    choices = [chunk.choices[0] for chunk in chunks]
    texts = [one.text if ask == "complete" else (one.delta if is_streamed else one.message).content for one in choices]
    assert [one.finish_reason for one in choices[:-1]] == [None] * (len(choices) - 1)
    return [text for text in texts if text], choices[-1].finish_reason, chunks[-1].usage.completion_tokens


@pytest.fixture
def texts(server) -> list[str]:
    """Returns the greedy text after each of its tokens."""
    inputs = server.processor(PROMPT, return_tensors="pt", return_token_type_ids=False)
    output = server.loaded_model.generate(**inputs, max_new_tokens=COUNT, do_sample=False, ssd_config=None)
    new = output[0, inputs["input_ids"].shape[1] :]
    return [server.processor.decode(new[: i + 1], skip_special_tokens=True) for i in range(COUNT)]


@pytest.mark.parametrize("ask, is_streamed", [("complete", False), slowly("complete", True), ("chat", True)])
def test_a_text_ends_before_its_stop_string(server, texts, ask, is_streamed):
    """Stop strings of several lengths, which begin and end anywhere in tokens."""
    text, before = texts[-1], server.figures()
    for start, length in [(0, 1), (0, 5), (1, 2), (16, 4), (29, 9), (len(text) - 5, 5)]:
        stop = text[start : start + length]
        first = text.index(stop)
        needed = 1 + next(i for i, begun in enumerate(texts) if stop in begun)
        for stops in (stop, ["no such", stop, text[:3] + "never"]):
            found, reason, count = answer(server, ask, is_streamed, stop=stops)
            assert ("".join(found), reason, count) == (text[:first], "stop", needed)
    after = server.figures()
    tokens, rounds = (after[name] - before[name] for name in ("tokens_total", "rounds_total"))
    tokens, rounds = tokens - 18, rounds - 18  # the first round of each answer has nothing to verify yet
    assert rounds < 0.75 * tokens and after["hits_total"] > before["hits_total"], "a round brings several tokens"


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_the_beginning_of_a_stop_string_that_goes_on_otherwise_is_sent(server, texts, ask):
    text = texts[-1]
    stops = [text[10:13] + "never", text[-3:] + "never"]
    found, reason, count = answer(server, ask, True, stop=stops)
    assert "".join(found) == text and reason == "length" and count == COUNT
    assert answer(server, ask, False, stop=stops) == ([text], "length", COUNT)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_special_tokens_are_stop_strings_by_name_and_hide_none(server, texts, is_streamed):
    """Answers do not show them."""
    special = next(i for i in range(1, COUNT) if texts[i] == texts[i - 1])
    text, after = texts[special], texts[special + 1]
    for stop, expected, needed in [("<s>", text, special + 1), (after[len(text) - 1 :], text[:-1], special + 2)]:
        found, reason, count = answer(server, "complete", is_streamed, stop=stop, tokens=2 * COUNT)
        assert ("".join(found), reason, count) == (expected, "stop", needed)


def test_a_stop_string_that_begins_in_the_prompt_ends_nothing(server, texts):
    stop = PROMPT[-2:] + texts[0]
    assert stop not in texts[-1] and answer(server, "complete", False, stop=stop)[1] == "length"


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def sent(pieces: list[tuple[str, str]], stops: list[str], is_streamed: bool) -> list[tuple[str, str]]:
    """Returns what a choice whose tokens are these texts of fields gives a handler, each after the name of its type."""

    def read(text: str) -> list[dict]:
        return [{"type": "region_chunk", "field": field, "text": text, "dirty": False} for field, text in [now[0]]]

    def step(_, token: int) -> str:
        now[:] = [pieces[token]]
        return pieces[token][1]

    now: list[tuple[str, str]] = []
    loop = SimpleNamespace(call_soon_threadsafe=lambda put, item: put(item))
    parser = SimpleNamespace(initial_events=[], feed=read, finalize=list, is_raw=False)
    message = {"role": "user", "content": ""}
    asked = ChatRequest.model_validate({"messages": [message], "stop": stops, "stream": is_streamed})
    choice = Choice(loop, SimpleNamespace(decode=lambda *_, **__: ""), asked, parser)
    choice.decoder = SimpleNamespace(step=step)
    for token in range(len(pieces)):
        choice.put(torch.tensor([token]))
    choice.end()
    items = [choice.queue.get_nowait() for _ in range(choice.queue.qsize())]
    assert items.pop() is None and len(choice.marks) == len(items)
    return [(type(item).__name__, item) for item in items]


@settings(max_examples=200)
@given(st.lists(st.text("abc", min_size=1, max_size=3), max_size=8), STOPS)
def test_streamed_and_whole_answers_agree_however_the_text_is_cut_into_tokens(pieces, stops):
    texts = ["".join(pieces[:count]) for count in range(len(pieces) + 1)]
    text = next((text for text in texts if any(stop in text for stop in stops)), texts[-1])  # it ends when one is there
    expected = text[: min([text.index(stop) for stop in stops if stop in text], default=len(text))]
    streamed = [piece for _, piece in sent([("content", piece) for piece in pieces], stops, True)]
    whole = [piece for _, piece in sent([("content", piece) for piece in pieces], stops, False)]
    assert "".join(streamed) == expected and whole == [expected] * bool(expected)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_reasoning_ends_before_a_stop_string_and_is_sent_before_the_content(is_streamed):
    pieces = [("thinking", "think"), ("thinking", "a"), ("content", "b"), ("content", "c")]
    found = sent(pieces, ["ab"], is_streamed)
    expected = [("ReasoningText", "think"), ("ReasoningText", "a"), ("str", "b"), ("str", "c")]
    assert found == (expected if is_streamed else [("ReasoningText", "thinka"), ("str", "bc")])
    assert sent(pieces, ["nka"], is_streamed) == [("ReasoningText", "thi")]


@pytest.mark.parametrize("kind", vocabularies.KINDS)
def test_a_stop_string_is_found_with_the_token_that_completes_it(kind):
    """Also one of characters that are several tokens, and one that ends within a token."""
    tokenizer = vocabularies.KINDS[kind]()
    ids = tokenizer("größer als das 日本 the quick brown fox", return_tensors="pt")["input_ids"]
    texts = [tokenizer.decode(ids[0, 3:length], skip_special_tokens=True) for length in range(4, ids.shape[1] + 1)]
    for stop in (texts[-1][2:5], texts[-1][4:6], "fo", "日本"):
        if stop not in texts[-1]:  # this tokenizer does not know all characters
            continue
        criteria = StopCriteria([Row([stop], None, tokenizer.backend_tokenizer)], 3)
        found = [bool(criteria(ids[:, :length], None)) for length in range(4, ids.shape[1] + 1)]
        assert found == [stop in text for text in texts], stop


def test_text_that_cannot_begin_a_stop_string_is_not_held_back():
    cut = Cut(["stop", "op!"])
    sent = "|".join(cut.add(piece) for piece in ("a s", "t", "o", "x", "sto", "p it", "more"))
    assert sent == "a |||stox|||"
