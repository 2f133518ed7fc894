"""The small pair, with one worker for all chats."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_ssd
from hf_ssd.cli import check, doctor, models, pair
from hf_ssd.cli.chat import Chat
from hf_ssd.cli.main import main
from hf_ssd.cli.methods import Bench


@pytest.fixture(autouse=True)
def no_dtype_is_timed(monkeypatch):
    """So there is no advice, and a processor that emulates bfloat16 is not waited for."""
    monkeypatch.setattr(doctor, "fastest", lambda *_: "float32")


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


def checked(capsys, *words: str) -> tuple[int, dict]:
    """Returns the exit code of a check, and what it says as JSON."""
    capsys.readouterr()  # bars of models that were saved
    code = main(["check", *words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert list(found) == check.KEYS
    return code, found


@pytest.fixture
def nothing_loads(monkeypatch):
    """Fails a test in which weights are read or a worker is started."""

    def refuse(*args, **kwargs):
        pytest.fail("the models were loaded first")

    monkeypatch.setattr(models.Model, "load", refuse)
    monkeypatch.setattr(hf_ssd, "launch_draft", refuse)


def lets_assisted_generation_fail(monkeypatch, error: Exception) -> None:
    """As for a pair that only we take."""
    run = Bench.run

    def run_ours(bench, method, turn):
        if "assistant_model" in method.options and "ssd_config" not in method.options:
            raise error
        return run(bench, method, turn)

    monkeypatch.setattr(Bench, "run", run_ours)


def goes_on_as_plain(chat: Chat, words: str) -> None:
    """Sends a message, whose answer must be that of plain generation from the whole text."""
    tokens = torch.tensor([chat.tokens_after(words)])
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": chat.args.max_new_tokens}
    plain = chat.target.generate(tokens, **options, do_sample=False)
    chat.answer(words)
    answer = chat.tokenizer.decode(plain[0, tokens.shape[1] :], skip_special_tokens=True)
    assert chat.messages[-1] == {"role": "assistant", "content": answer} and chat.text.endswith(f"{words}\n{answer}")
    assert chat.cache.get_seq_length() == len(chat.cached) == plain.shape[1] - 1
