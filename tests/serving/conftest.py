"""Servers that tests share, a browser, and what plain generation answers."""

import signal
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_ssd

from ..helpers import vocabularies
from ..helpers.browser import start_browser
from ..helpers.servers import LONG, PAIR, ServerProcess, ServerThread, target_folder
from ..helpers.tiny import tiny_draft, tiny_model

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="package")
def chat_model(tmp_path_factory) -> str:
    """Returns a folder of the embedded target with the simplest chat template."""
    return target_folder(tmp_path_factory, chat_template=TEMPLATE)


@pytest.fixture(scope="package")
def program(chat_model):
    """`hf-ssd serve`, whose plan is fixed, so that it speculates however busy the machine is."""
    program = ServerProcess(chat_model, "--lookahead", "3", "--budget", "4", start=subprocess.Popen)
    yield program
    assert program.ends_with_its_worker(signal.SIGINT)  # as Ctrl-C does


def saved(model, folder: Path) -> str:
    """Saves a model with a tokenizer that has a chat template."""
    model.save_pretrained(folder)
    tokenizer = vocabularies.tokenizer(vocabularies.TARGET)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> str:
    """Returns a folder of a tiny target with many positions."""
    return saved(tiny_model(max_position_embeddings=LONG), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_draft_folder(tmp_path_factory) -> str:
    return saved(tiny_draft(max_position_embeddings=LONG), tmp_path_factory.mktemp("models") / "draft")


@pytest.fixture(scope="session")
def server(tiny_folder, assistant):
    """A server in this process, with a fixed plan, and the workers that all tests share."""
    with ServerThread(tiny_folder, assistant, hf_ssd.SSDConfig(lookahead=3, budget=4)) as server:
        yield server


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    browser = start_browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.quit()


@pytest.fixture(scope="session")
def plain():
    """Returns the text that plain greedy generation gives."""
    model = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")

    def text(prompt: str, tokens: int, **options) -> str:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, tokenizer=tokenizer, **options)
        return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    text.tokenizer = tokenizer
    return text
