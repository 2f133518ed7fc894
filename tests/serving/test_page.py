"""The page, in a browser without a screen."""

import itertools
import re
import shutil

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.expected_conditions import alert_is_present
from selenium.webdriver.support.ui import WebDriverWait

from hf_ssd import SSDConfig

from .conftest import ServerThread
from .test_server import plain  # noqa: F401

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs chromium and chromium-driver")
QUIET = "gpu quic background-networking component-update sync extensions".split()
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
DESK = {"width": 1100, "height": 1000, "deviceScaleFactor": 1, "mobile": False}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for word in ("--headless=new", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in QUIET)):
        options.add_argument(word)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield browser
    browser.quit()


@pytest.fixture
def page(browser, server):
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", DESK)
    browser.get(server.url)
    browser.get_log("browser")
    return browser


def by_id(page, name: str):
    return page.find_element(By.ID, name)


def fill(page, name: str, text: str) -> None:
    by_id(page, name).clear()
    by_id(page, name).send_keys(text)


def generate(page, prompt: str, tokens: int) -> None:
    """Types a prompt, and waits until its answer is there."""
    fill(page, "prompt", prompt)
    fill(page, "count", str(tokens))
    by_id(page, "prompt").send_keys(Keys.CONTROL, Keys.ENTER)
    WebDriverWait(page, 60).until(lambda _: by_id(page, "status").text.startswith("Done"))


def figure(page, name: str) -> float:
    return float(by_id(page, name).text)


PROMPT = "import os\n\ndef main("


def test_an_answer_has_three_colours_and_the_figures_of_metrics(page, server, plain):  # noqa: F811
    before = server.figures()
    generate(page, PROMPT, 120)
    kinds = {
        name: page.find_elements(By.CSS_SELECTOR, f"#text .{name}") for name in ("prepared", "drafted", "of-target")
    }
    assert all(kinds.values())
    colours = {found[0].value_of_css_property("background-color") for found in kinds.values()}
    assert len(colours) == 3
    assert by_id(page, "text").get_attribute("textContent") == PROMPT + plain(PROMPT, 120)
    after = server.figures()
    gained = {name: after[name] - before[name] for name in before}
    assert gained["tokens_total"] == 120 and gained["finished"] == 1
    for name, part, whole in [
        ("hits", "hits_total", "drafted_total"),
        ("acceptance", "accepted_total", "tested_total"),
        ("per-round", "rounds_total", "rounds_total"),
    ]:
        # A round gives its accepted tokens and one more; the last one may give some that are not wanted.
        expected = gained[part] / gained[whole] if name != "per-round" else 1 + gained["accepted_total"] / gained[whole]
        assert figure(page, name) == pytest.approx(expected, abs=0.006)
    drafted = len(kinds["prepared"]) + len(kinds["drafted"])
    assert gained["accepted_total"] - 3 <= drafted <= gained["accepted_total"]
    bars = page.find_elements(By.CSS_SELECTOR, "#timeline rect")
    assert {bar.get_attribute("data-what") for bar in bars} == {"verify", "wait", "prepare", "answer"}
    assert not [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"]


def test_without_draft_gives_the_same_text_and_a_speed_beside_the_other(page, server):
    generate(page, PROMPT, 40)
    text = by_id(page, "text").get_attribute("textContent")
    rounds = server.figures()["rounds_total"]
    by_id(page, "plain").click()
    generate(page, PROMPT, 40)
    assert by_id(page, "text").get_attribute("textContent") == text
    assert not page.find_elements(By.CSS_SELECTOR, "#text .prepared, #text .drafted")
    assert server.figures()["rounds_total"] == rounds
    assert figure(page, "speed") > 0 and figure(page, "speed-plain") > 0


def test_an_answer_of_a_chat_model_stands_below_its_prompt(page):
    generate(page, PROMPT, 20)
    prompt, answer = (page.find_element(By.CSS_SELECTOR, f"#text .{name}").rect for name in ("prompt", "answer"))
    assert answer["y"] >= prompt["y"] + prompt["height"]


def test_tokens_that_are_part_of_a_character_are_counted(page, server):
    before = server.figures()["tokens_total"]
    page.execute_script(
        "document.getElementById('prompt').value = arguments[0]",
        "# \U0001f600\U0001f600\U0001f600\U0001f600 = '\U0001f600\U0001f600",
    )
    fill(page, "count", "40")
    page.execute_script("document.getElementById('form').requestSubmit()")
    WebDriverWait(page, 60).until(lambda _: by_id(page, "status").text.startswith("Done"))
    count = server.figures()["tokens_total"] - before
    assert by_id(page, "status").text.startswith(f"Done: {count:.0f} tokens in ")
    assert len(page.find_elements(By.CSS_SELECTOR, "#text .answer span")) <= count


def test_figures_are_of_this_prompt_only(page):
    def ask(prompt: str, is_plain: bool) -> dict[str, str]:
        if by_id(page, "plain").is_selected() != is_plain:
            by_id(page, "plain").click()
        generate(page, prompt, 20)
        return {name: by_id(page, name).text for name in ("speed", "speed-plain", "per-round", "hits", "acceptance")}

    plain_first = ask("def first(", True)
    assert plain_first["speed-plain"] != "–" and plain_first["speed"] == "–"
    assert ask("def first(", False)["speed-plain"] == plain_first["speed-plain"]
    drafted = ask("def other(", False)
    assert drafted["speed-plain"] == "–" and drafted["speed"] != "–" and drafted["per-round"] != "–"
    assert ask("def third(", True) | {"speed-plain": "–"} == dict.fromkeys(drafted, "–")
    assert page.find_elements(By.CSS_SELECTOR, "#timeline rect") == []


def test_an_answer_can_be_stopped_and_a_refusal_is_shown(page, server):
    before = server.figures()["cancelled"]
    fill(page, "count", "1500")
    by_id(page, "run").click()
    WebDriverWait(page, 30).until(lambda _: page.find_elements(By.CSS_SELECTOR, "#text .prepared"))
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    WebDriverWait(page, 30).until(lambda _: by_id(page, "status").text == "Stopped.")
    WebDriverWait(page, 30).until(lambda _: server.figures()["cancelled"] == before + 1)
    fill(page, "count", "5")
    page.execute_script("document.getElementById('prompt').value = 'a b '.repeat(1500)")
    by_id(page, "run").click()
    WebDriverWait(page, 30).until(lambda _: "The prompt has 3001 tokens" in by_id(page, "error").text)


def test_the_keyboard_reaches_everything_and_nothing_is_fetched_from_elsewhere(page, server):
    by_id(page, "prompt").click()
    reached = []
    for _ in range(6):
        page.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(page.switch_to.active_element.get_attribute("id"))
    assert reached[:4] == ["count", "temperature", "plain", "run"] and "text" in reached
    page.get_log("performance")  # the browser's own start page is in it
    page.get(server.url)
    asked = re.findall(r'"url":"(https?://[^"/]+)', " ".join(entry["message"] for entry in page.get_log("performance")))
    assert asked and set(asked) == {server.url}


def test_the_page_asks_for_the_key_of_a_server_that_has_one(browser, tiny_folder, assistant):
    server = ServerThread(tiny_folder, assistant, SSDConfig(lookahead=3, budget=4), name="small", api_key="secret")
    try:
        browser.get(server.url)
        for key in ("wrong", "secret"):
            alert = WebDriverWait(browser, 20).until(alert_is_present())
            alert.send_keys(key)
            alert.accept()
        WebDriverWait(browser, 20).until(lambda _: by_id(browser, "name").text == "small")
        generate(browser, "abc", 5)
        assert by_id(browser, "status").text.startswith("Done: 5 tokens")
    finally:
        server.stop()


def test_both_themes_at_both_sizes(page, tmp_path):
    generate(page, PROMPT, 100)
    for theme, size in itertools.product(["light", "dark"], [DESK, PHONE]):
        page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        feature = {"name": "prefers-color-scheme", "value": theme}
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        check_page(page, theme, size, tmp_path)


def check_page(page, theme: str, size: dict, tmp_path):
    assert page.execute_script("return document.documentElement.scrollWidth") <= size["width"]
    photograph = tmp_path / f"page-{theme}.png"
    assert page.save_screenshot(str(photograph)) and photograph.stat().st_size > 20_000
    text, back = (
        luminance(page.find_element(By.TAG_NAME, "body").value_of_css_property(name))
        for name in ("color", "background-color")
    )
    assert (back > text) == (theme == "light")
    for name in ("prepared", "drafted"):
        under = luminance(
            page.find_element(By.CSS_SELECTOR, f"#text .{name}").value_of_css_property("background-color")
        )
        brighter, darker = max(text, under), min(text, under)
        assert (brighter + 0.05) / (darker + 0.05) > 4.5, "hard to read, by WCAG's measure"


def luminance(colour: str) -> float:
    """Returns WCAG's relative luminance of `rgb(...)`."""
    parts = [int(x) / 255 for x in re.findall(r"\d+", colour)[:3]]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear))
