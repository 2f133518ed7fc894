"""What tests of several commands use."""

import io
import json
import sys

import pytest

import hf_ssd
from hf_ssd.cli import check, doctor, models
from hf_ssd.cli.main import main
from hf_ssd.cli.methods import Bench


@pytest.fixture(autouse=True)
def no_dtype_is_timed(monkeypatch):
    """So there is no advice, and a processor that emulates bfloat16 is not waited for."""
    monkeypatch.setattr(doctor, "fastest", lambda *_: "float32")


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


def typed(monkeypatch, text: str | bytes) -> None:
    """Makes this text the standard input."""
    raw = text if isinstance(text, bytes) else text.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))


def lets_assisted_generation_fail(monkeypatch, error: Exception) -> None:
    """As for a pair that only we take."""
    run = Bench.run

    def run_ours(bench, method, turn):
        if "assistant_model" in method.options and "ssd_config" not in method.options:
            raise error
        return run(bench, method, turn)

    monkeypatch.setattr(Bench, "run", run_ours)
