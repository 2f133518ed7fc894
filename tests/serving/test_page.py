"""The page, in a browser without a screen."""

import itertools
import re
import shutil

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.expected_conditions import alert_is_present
from selenium.webdriver.support.ui import WebDriverWait

from hf_ssd import SSDConfig, launch_draft

from ..helpers.browser import ask, by_id, enter, needs_browser, press, texts, visit, wait_for
from ..helpers.servers import PAIR, ServerThread

pytestmark = needs_browser
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
DESK = {"width": 1100, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
PLAN = SSDConfig(lookahead=3, budget=4, tree_nodes=6, verification="coupled")
PROMPT = "import os\n\ndef main("


@pytest.fixture(scope="module")
def server(chat_model):
    """A server in this process, with the embedded pair and a fixed plan, of trees."""
    with launch_draft(str(PAIR / "draft"), num_threads=1) as assistant:
        with ServerThread(chat_model, assistant, PLAN) as server:
            yield server


@pytest.fixture
def page(browser, server):
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", DESK)
    visit(browser, server)
    browser.get_log("browser")
    return browser


@pytest.mark.slow
def test_an_answer_has_three_colours_and_the_figures_of_metrics(page, server, plain):
    before = server.figures()
    ask(page, PROMPT, 120)
    assert not page.find_element(By.CSS_SELECTOR, ".tokens").is_displayed()
    press(page, "open")
    kinds = {name: page.find_elements(By.CSS_SELECTOR, f".tokens .{name}") for name in CLASSES}
    assert all(kinds.values()) and kinds["prepared"][0].is_displayed()
    assert len({found[0].value_of_css_property("background-color") for found in kinds.values()}) == 3
    assert texts(page, ".question") == [PROMPT] and texts(page, ".tokens") == [plain(PROMPT, 120)]
    gained = server.gained(before)
    assert gained["tokens_total"] == 120 and gained["finished"] == 1
    for name, part, whole in [
        ("hits", "hits_total", "drafted_total"),
        ("acceptance", "accepted_total", "tested_total"),
        ("per-round", "rounds_total", "rounds_total"),
    ]:
        # A round gives its accepted tokens and one more; the last one may give some that are not wanted.
        expected = gained[part] / gained[whole] if name != "per-round" else 1 + gained["accepted_total"] / gained[whole]
        assert float(texts(page, f"dd.{name}")[0]) == pytest.approx(expected, abs=0.006)
    drafted = len(kinds["prepared"]) + len(kinds["drafted"])
    assert gained["accepted_total"] - 3 <= drafted <= gained["accepted_total"]
    siblings = page.find_elements(By.CSS_SELECTOR, ".tokens .sibling")
    assert 0 < gained["siblings_total"] - 1 <= len(siblings) <= gained["siblings_total"]
    assert texts(page, "dd.siblings") == ["{siblings_total:g} of {nodes_total:g}".format(**gained)]
    bars = page.find_elements(By.CSS_SELECTOR, "svg rect")
    assert {bar.get_attribute("data-what") for bar in bars} == {"verify", "wait", "prepare", "answer"}
    assert re.fullmatch(r"the last 12 rounds: \d+\.\d+ s", texts(page, "svg text")[-1])
    assert re.fullmatch(r"120 tokens in \d+\.\d+ s, \d+\.\d tokens/s", texts(page, ".speed")[0])
    assert not [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"]


CLASSES = ("prepared", "drafted", "of-target")


def test_a_button_compares_an_answer_with_plain_decoding(page, server):
    ask(page, PROMPT, 40)
    before = server.figures()
    press(page, "compare")
    WebDriverWait(page, 60).until(lambda _: texts(page, ".verdict")[0])
    gained = server.gained(before)
    assert gained["rounds_total"] == 0 and gained["tokens_total"] == 40
    speeds = [float(texts(page, f".{name}-speed")[0].removesuffix(" tokens/s")) for name in ("drafting", "plain")]
    ratio, verdict = texts(page, ".verdict")[0].split(" ", 1)
    assert float(ratio) == pytest.approx(speeds[0] / speeds[1], abs=0.1)
    assert verdict == "times as fast as plain decoding. The text is the same."


@pytest.mark.slow
def test_a_conversation_has_a_history_and_a_system_prompt_until_a_new_one_begins(page, plain):
    enter(page, "system", "# A module.")
    said = "# A module."
    for question in ("import os\n\n\ndef a(", "\n\n\ndef b("):
        ask(page, question, 20)
        said += question
        answer = plain(said, 20)
        assert texts(page, ".tokens")[-1] == answer
        said += answer
    assert len(texts(page, ".question")) == 2
    by_id(page, "new").click()
    assert texts(page, ".question") == [] and by_id(page, "welcome").is_displayed()
    ask(page, PROMPT, 20)
    assert texts(page, ".tokens") == [plain("# A module." + PROMPT, 20)]


@pytest.mark.slow
def test_settings_are_those_of_the_next_answer(page):
    by_id(page, "settings-button").click()
    for name, value in {"count": "25", "temperature": "1.5", "seed": "7", "top-p": "0.95"}.items():
        by_id(page, name).clear()
        by_id(page, name).send_keys(value)
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not by_id(page, "settings").is_displayed()
    answers = []
    for seed in (7, 7, 8):
        enter(page, "seed", seed)
        ask(page, PROMPT, 25)
        answers += texts(page, ".tokens")
        by_id(page, "new").click()
    assert answers[0] == answers[1] != answers[2]
    enter(page, "seed", -1)
    by_id(page, "prompt").send_keys(PROMPT, Keys.ENTER)
    assert by_id(page, "settings").is_displayed() and texts(page, ".question") == []


def test_the_keyboard_sends_breaks_lines_stops_and_reaches_everything(page, server):
    before = server.figures()
    enter(page, "count", 1500)
    by_id(page, "prompt").send_keys("import os", Keys.SHIFT, Keys.ENTER, Keys.NULL, "import re", Keys.ENTER)
    assert texts(page, ".question") == ["import os\nimport re"] and by_id(page, "prompt").get_property("value") == ""
    WebDriverWait(page, 30).until(lambda _: texts(page, ".tokens span"))
    assert by_id(page, "stop").is_displayed() and not by_id(page, "send").is_displayed()
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    wait_for(page, "status", "Stopped.")
    assert by_id(page, "send").is_displayed() and len(texts(page, ".tokens span")) < 1400
    WebDriverWait(page, 30).until(lambda _: server.gained(before)["cancelled"] == 1)
    by_id(page, "prompt").click()
    reached = []
    for _ in range(14):
        page.switch_to.active_element.send_keys(Keys.TAB)
        one = page.switch_to.active_element
        reached.append(one.get_attribute("id") or one.get_attribute("data-do"))
    assert {"prompt", "send", "new", "settings-button", "copy", "open", "compare"} <= {*reached}
    nameless = "return [...document.querySelectorAll('button, input, textarea')].filter(one => " + (
        "!(one.textContent || one.labels.length || one.ariaLabel)).map(one => one.id)"
    )
    assert page.execute_script(nameless) == []


@pytest.mark.slow
def test_a_question_is_answered_beside_other_requests_and_says_so(page, server):
    other = server.complete(PROMPT, 2000, stream=True)
    next(iter(other))
    ask(page, PROMPT, 300, until="beside 1 other answer")
    wait_for(page, "status", "Done")
    assert server.figures()["num_requests_running"] == 1
    other.close()


@pytest.mark.slow
def test_tokens_that_are_part_of_a_character_are_counted(page, server):
    before = server.figures()
    ask(page, "# \U0001f600\U0001f600\U0001f600\U0001f600 = '\U0001f600\U0001f600", 40)
    count = server.gained(before)["tokens_total"]
    assert texts(page, ".speed")[0].startswith(f"{count:.0f} tokens in ")
    assert len(texts(page, ".tokens span")) <= count


def test_a_refused_question_can_be_changed_and_sent_again(page):
    ask(page, PROMPT, 5)
    enter(page, "prompt", "a b " * 1500)
    by_id(page, "send").click()
    wait_for(page, "error", "tokens; the model takes fewer than 2048.")
    assert by_id(page, "prompt").get_property("value") == "a b " * 1500 and len(texts(page, ".question")) == 1
    ask(page, "\nimport re", 5)
    assert len(texts(page, ".tokens")) == 2 and not by_id(page, "error").is_displayed()


def test_nothing_is_fetched_from_elsewhere(page, server):
    page.get_log("performance")  # the browser's own start page is in it
    visit(page, server)
    asked = re.findall(r'"url":"(https?://[^"/]+)', " ".join(entry["message"] for entry in page.get_log("performance")))
    assert asked and set(asked) == {server.url}
    elsewhere = server.url.replace("127.0.0.1", "localhost") + "/health"
    fetched = (
        "const done = arguments[1]; fetch(arguments[0], {mode: 'no-cors'}).then(() => done(true), () => done(false))"
    )
    assert page.execute_async_script(fetched, server.url + "/health") is True
    assert page.execute_async_script(fetched, elsewhere) is False


def test_a_request_with_a_history_says_how_much_it_reads(server, plain):
    body = {"prompt": " = 1", "history": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    events = server.live(**body, max_new_tokens=10)
    assert events[0].keys() == {"reading"} and 0 < events[0]["reading"] <= 6 and events[-1] == {"end": "finished"}
    assert "".join(text for event in events[1:-1] for text, _ in event["tokens"]) == plain("ab = 1", 10)


@pytest.fixture(scope="module")
def bare(tiny_folder, tmp_path_factory, assistant):
    """A server with a key, whose model has no chat template."""
    folder = tmp_path_factory.mktemp("models") / "bare"
    shutil.copytree(tiny_folder, folder, ignore=shutil.ignore_patterns("chat_template*"))
    plan = SSDConfig(lookahead=3, budget=4)
    with ServerThread(str(folder), assistant, plan, name="small", key="secret", api_key="secret") as server:
        yield server


@pytest.mark.slow
def test_the_page_asks_for_a_key_and_continues_the_texts_of_a_model_without_a_chat_template(browser, bare):
    browser.get(bare.url)
    for key in ("wrong", "secret"):
        alert = WebDriverWait(browser, 20).until(alert_is_present())
        alert.send_keys(key)
        alert.accept()
    wait_for(browser, "model", "small")
    assert by_id(browser, "prompt").get_property("value").startswith("class Queue:")
    assert not by_id(browser, "system").is_displayed()
    for prompt in ("abc", "", "d"):  # without a text it goes on
        ask(browser, prompt, 5, until="Done")
    first, second, third = texts(browser, ".tokens")
    assert (
        browser.find_elements(By.CSS_SELECTOR, ".tokens")[2].is_displayed() and texts(browser, ".markdown") == [""] * 3
    )
    answers = [
        bare.complete(prompt, tokens).choices[0].text for prompt, tokens in [("abc", 10), (first + second + "d", 5)]
    ]
    assert first.startswith("abc") and third == f"d {answers[1]}"
    assert first + second == f"abc {answers[0]}"  # this tokenizer has a space between two tokens


@pytest.mark.slow
def test_both_themes_at_both_sizes(page, tmp_path):
    ask(page, PROMPT, 100)
    press(page, "open")
    for theme, size in itertools.product(["light", "dark"], [DESK, PHONE]):
        page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        feature = {"name": "prefers-color-scheme", "value": theme}
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        check_page(page, theme, size, tmp_path)


def check_page(page, theme: str, size: dict, tmp_path):
    photograph = tmp_path / f"page-{theme}.png"
    assert page.save_screenshot(str(photograph)) and photograph.stat().st_size > 20_000
    for name in ("prompt", "send", "new", "settings-button", "settings"):
        page.execute_script("document.getElementById('settings').togglePopover(arguments[0] === 'settings')", name)
        place = by_id(page, name).rect
        assert place["x"] >= 0 and place["x"] + place["width"] <= size["width"]
        assert place["y"] >= 0 and place["y"] + place["height"] <= size["height"]
    page.execute_script("document.getElementById('settings').hidePopover()")
    assert page.execute_script("return document.documentElement.scrollWidth") <= size["width"]
    text, back = (
        luminance(page.find_element(By.TAG_NAME, "body").value_of_css_property(name))
        for name in ("color", "background-color")
    )
    assert (back > text) == (theme == "light")
    for selector in (".tokens .prepared", ".tokens .drafted", "#send"):
        one = page.find_element(By.CSS_SELECTOR, selector)
        inks = (luminance(one.value_of_css_property(name)) for name in ("color", "background-color"))
        darker, brighter = sorted(inks)
        assert (brighter + 0.05) / (darker + 0.05) > 4.5, "hard to read, by WCAG's measure"


def luminance(colour: str) -> float:
    """Returns WCAG's relative luminance of `rgb(...)`."""
    parts = [int(x) / 255 for x in re.findall(r"\d+", colour)[:3]]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear))
