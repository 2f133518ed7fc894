"""A text of the server ends before its stop string, as OpenAI's does, whole and streamed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ssd.serving.rows import Cut, Row, StopCriteria

from ..helpers import vocabularies
from ..helpers.servers import PROMPT, said
from ..helpers.suites import slowly

COUNT = 40


def answer(server, ask: str, is_streamed: bool, tokens: int = COUNT, **options) -> tuple[str, str, int]:
    """Returns the text of an answer, why it ended, and how many tokens it had."""
    chunks = server.chunks(ask, PROMPT, tokens, is_streamed, **options)
    (choice,) = said(chunks)
    return choice.text, choice.reason, chunks[-1].usage.completion_tokens


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
            assert answer(server, ask, is_streamed, stop=stops) == (text[:first], "stop", needed)
    gained = server.gained(before)
    tokens, rounds = gained["tokens_total"] - 18, gained["rounds_total"] - 18  # the first rounds have nothing to verify
    assert rounds < 0.75 * tokens and gained["hits_total"] > 0, "a round brings several tokens"


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_the_beginning_of_a_stop_string_that_goes_on_otherwise_is_sent(server, texts, ask):
    text = texts[-1]
    stops = [text[10:13] + "never", text[-3:] + "never"]
    for is_streamed in (False, True):
        assert answer(server, ask, is_streamed, stop=stops) == (text, "length", COUNT)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_special_tokens_are_stop_strings_by_name_and_hide_none(server, texts, is_streamed):
    """Answers do not show them."""
    special = next(i for i in range(1, COUNT) if texts[i] == texts[i - 1])
    text, after = texts[special], texts[special + 1]
    for stop, expected, needed in [("<s>", text, special + 1), (after[len(text) - 1 :], text[:-1], special + 2)]:
        found = answer(server, "complete", is_streamed, stop=stop, tokens=2 * COUNT)
        assert found == (expected, "stop", needed)


def test_a_stop_string_that_begins_in_the_prompt_ends_nothing(server, texts):
    stop = PROMPT[-2:] + texts[0]
    assert stop not in texts[-1] and answer(server, "complete", False, stop=stop)[1] == "length"


@settings(max_examples=200)
@given(
    st.lists(st.text("abc", min_size=1, max_size=3), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_text_is_cut_before_its_stop_string_however_it_is_cut_into_tokens(pieces, stops):
    texts = ["".join(pieces[:count]) for count in range(len(pieces) + 1)]
    text = next((text for text in texts if any(stop in text for stop in stops)), texts[-1])  # it ends when one is there
    cut = Cut(stops)
    found = "".join(map(cut.add, pieces)) + cut.release()
    assert found == text[: min([text.index(stop) for stop in stops if stop in text], default=len(text))]


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
