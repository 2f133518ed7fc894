"""A browser without a screen, and what a user does with the page."""

import shutil
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

import hf_ssd

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
QUIET = "gpu quic background-networking component-update sync extensions".split()
PAGE = Path(hf_ssd.__file__).parent / "serving" / "page.html"
needs_browser = pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs chromium and chromium-driver")


def start_browser(folder):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for word in ("--headless=new", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in QUIET)):
        options.add_argument(word)
    options.add_argument(f"--user-data-dir={folder}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService(DRIVER))


def visit(page, server) -> None:
    page.get(server.url)
    WebDriverWait(page, 20).until(lambda _: by_id(page, "name").get_attribute("textContent"))


def by_id(page, name: str):
    return page.find_element(By.ID, name)


def wait_for(page, name: str, text: str) -> None:
    WebDriverWait(page, 60).until(lambda _: text in by_id(page, name).text)


def enter(page, name: str, value) -> None:
    page.execute_script("document.getElementById(arguments[0]).value = arguments[1]", name, str(value))


def ask(page, prompt: str, tokens: int, until: str = "Done") -> None:
    """Types a message, and waits until its answer is complete."""
    enter(page, "count", tokens)
    enter(page, "prompt", prompt)
    by_id(page, "prompt").send_keys(Keys.ENTER)
    wait_for(page, "status", until)


def texts(page, selector: str) -> list[str]:
    return [one.get_attribute("textContent") for one in page.find_elements(By.CSS_SELECTOR, selector)]


def press(page, what: str) -> None:
    """Presses a button below the last answer."""
    page.find_elements(By.CSS_SELECTOR, f".answer > footer [data-do={what}]")[-1].click()
