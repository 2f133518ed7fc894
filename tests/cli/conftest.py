"""The small pair, with one worker for all chats."""

from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_ssd
from hf_ssd.cli import pair
from hf_ssd.cli.chat import Chat


@pytest.fixture(scope="package")
def embedded():
    """The target, the draft and the tokenizer."""
    models = [AutoModelForCausalLM.from_pretrained(pair.folder(name), dtype="float32") for name in ("target", "draft")]
    return hf_ssd.enable(models[0]), models[1], AutoTokenizer.from_pretrained(pair.folder("target"))


@pytest.fixture(scope="package")
def embedded_worker(embedded):
    with hf_ssd.launch_draft(embedded[1], num_threads=1) as assistant:
        yield assistant


@pytest.fixture
def chat(embedded, embedded_worker):
    target, _, tokenizer = embedded
    return Chat(SimpleNamespace(system=None, temperature=0.0, max_new_tokens=12), target, embedded_worker, tokenizer)
