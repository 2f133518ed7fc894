"""`--drafter ngram`: commands without a draft model."""

import json

import pytest

from hf_ssd.cli.main import main

QUICK = ["--drafter", "ngram", "--repeats", "1", "--new-tokens", "24"]


@pytest.mark.slow
def test_check_measures_a_lookup_of_the_embedded_target(capsys):
    code = main(["check", "--json", *QUICK])
    found = json.loads(capsys.readouterr().out)
    assert found["draft"] is None and found["looks_up"] and found["failure"] is None and found["plain"] > 0
    assert code == (0 if found["pays"] else 1)
    assert found["assisted"] > 0  # transformers looks the prompt up too
    assert found["pays"] or "repeat their prompts" in found["verdict"]


@pytest.mark.slow
def test_bench_compares_a_lookup_with_that_of_transformers(capsys):
    assert main(["bench", *QUICK, "--assistant-tokens", "4"]) == 0
    told = capsys.readouterr().out
    assert "plain generate" in told and "assisted, 4" in told and "SSD" in told and "in turn" not in told


@pytest.mark.slow
def test_a_chat_looks_up_what_was_said(capsys, monkeypatch):
    words = iter(["def f(x):\n    return x + 1\n\ndef f(x):\n    return x", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(words))
    assert main(["chat", "--drafter", "ngram", "--stats", "--max-new-tokens", "24"]) == 0
    told = capsys.readouterr().out
    assert "tokens/s" in told and ("acceptance" in told or "decoded plainly" in told)


@pytest.mark.parametrize("command", ["check", "chat", "bench"])
def test_a_draft_beside_a_lookup_is_refused(command, capsys):
    assert main([command, "A", "B", "--drafter", "ngram"]) == 2
    assert "--drafter ngram looks the prompt up and uses no draft; leave out B." in capsys.readouterr().err
