"""What the page shows while a server, whose part the test plays, answers or fails. No server is needed."""

import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from ..helpers.browser import PAGE, by_id, needs_browser, press, texts, wait_for

pytestmark = needs_browser


# The server's part is played by the test: it writes the events of an answer one by one.
PLAY = """
window.fetch = async (path, options) => {
  if (path === "/health") return new Response(JSON.stringify({draft: window.draft ?? "ready"}));
  if (window.refuse) return window.refuse();
  return new Response(new ReadableStream({start(stream) {
    const encoder = new TextEncoder();
    window.play = event => stream.enqueue(encoder.encode(`data: ${JSON.stringify(event)}\\n\\n`));
    window.leave = error => error ? stream.error(error) : stream.close();
    options.signal.addEventListener("abort", () => stream.error(new DOMException("", "AbortError")));
  }}));
};
"""


@pytest.fixture
def page(browser):
    browser.get(PAGE.as_uri())
    wait_for(browser, "draft", "The server does not answer")
    browser.execute_script(PLAY)
    return browser


@pytest.fixture
def stage(page):
    by_id(page, "prompt").send_keys("a", Keys.ENTER)
    WebDriverWait(page, 20).until(lambda _: page.execute_script("return Boolean(window.play)"))
    return page


def play(page, **event) -> None:
    page.execute_script("play(arguments[0])", event)


def say(page, text: str, count: int, seconds: float = 1.0) -> None:
    play(page, tokens=[[text, "target"]], count=count, seconds=seconds)


def test_the_status_says_what_happens_in_words_and_seconds(stage):
    wait_for(stage, "status", "Waiting for other requests to end …")
    play(stage, reading=1234)
    wait_for(stage, "status", "Reading the prompt, 1234 tokens …")
    wait_for(stage, "clock", "1 s")
    say(stage, "Hello **you**", 3, 55.414)
    wait_for(stage, "status", "Writing …")
    assert by_id(stage, "log").get_attribute("aria-busy") == "true"
    WebDriverWait(stage, 20).until(lambda _: texts(stage, ".speed") == ["3 tokens in 55.4 s, 0.1 tokens/s"])
    say(stage, ".", 1024, 60)
    play(stage, end="finished")
    wait_for(stage, "status", "Done, at the limit of 1024 tokens.")
    assert texts(stage, ".speed") == ["1024 tokens in 60.0 s, 17.1 tokens/s"]
    assert by_id(stage, "log").get_attribute("aria-busy") == "false"
    assert texts(stage, ".markdown strong") == ["you"]


@pytest.mark.parametrize(
    "temperature, text, expected",
    [(0, "same", "is the same."), (0, "other", "differs."), (1, "other", "is drawn at random.")],
)
def test_the_verdict_says_whether_the_texts_are_the_same(stage, temperature, text, expected):
    say(stage, "same", 30, 2)
    play(stage, end="finished")
    wait_for(stage, "status", "Done")
    stage.execute_script("turns[0].body.temperature = arguments[0]", temperature)
    press(stage, "compare")
    say(stage, text, 20, 4)
    play(stage, end="finished")
    WebDriverWait(stage, 20).until(lambda _: texts(stage, ".verdict")[0])
    verdict = texts(stage, ".verdict")[0]
    assert verdict.startswith("3.00 times as fast as plain decoding. ") and verdict.endswith(expected)


@pytest.mark.parametrize(
    "happens, sentence",
    [
        ("play({error: 'The draft is lost.'})", "The draft is lost."),
        ("leave()", "The server ended the answer early."),
        ("leave(new TypeError('network error'))", "The connection to the server broke."),
    ],
)
@pytest.mark.parametrize("has_begun", [False, True])
def test_an_answer_that_fails_ends_with_a_sentence(stage, happens, sentence, has_begun):
    play(stage, reading=5)
    if has_begun:
        say(stage, "so far", 2)
    stage.execute_script(happens)
    wait_for(stage, "error", sentence)
    assert texts(stage, ".markdown") == ["so far"] * has_begun
    assert by_id(stage, "prompt").get_property("value") == ("" if has_begun else "a")
    assert by_id(stage, "send").is_displayed() and by_id(stage, "status").text == ""


@pytest.mark.parametrize(
    "refuse, sentence",
    [
        ("() => Promise.reject(new TypeError('Failed to fetch'))", "The server does not answer."),
        ("() => new Response('<html>', {status: 502})", "The server answers with status 502."),
    ],
)
def test_a_server_that_is_gone_is_told_in_a_sentence(page, refuse, sentence):
    page.execute_script(f"window.refuse = {refuse}")
    by_id(page, "prompt").send_keys("a", Keys.ENTER)
    wait_for(page, "error", sentence)
    assert by_id(page, "prompt").get_property("value") == "a"


def test_the_state_of_the_draft_is_told_in_words(page):
    for state, words in {
        "ready": "Draft ready",
        "starting": "Draft is starting",
        "ended": "Draft has ended; the next message starts it again",
        "none": "No draft model",
    }.items():
        page.execute_script("window.draft = arguments[0]; showDraft()", state)
        wait_for(page, "draft", words)


def test_answers_and_code_are_copied(stage):
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    stage.execute_cdp_cmd("Browser.grantPermissions", {"permissions": permissions})
    answer = "Run:\n\n```sh\nls <dir> && cd\n```\n**Done**"
    say(stage, answer, 9)
    play(stage, end="finished")
    wait_for(stage, "status", "Done")
    read = "return navigator.clipboard.readText()"
    for has_clipboard in (True, False):  # pages of other machines have none without https
        stage.execute_script("if (!arguments[0]) navigator.clipboard.writeText = () => Promise.reject()", has_clipboard)
        for place, expected in [(".code", "ls <dir> && cd"), (".answer > footer", answer)]:
            button = f"{place} [data-do=copy]"
            stage.execute_script("document.querySelector(arguments[0]).click()", button)
            WebDriverWait(stage, 10).until(lambda _, expected=expected: stage.execute_script(read) == expected)
            assert texts(stage, button) == ["Copied"]
