"""`--drafter ngram`: commands without a draft model."""

import json

import pytest

from hf_ssd.cli import pair
from hf_ssd.cli.main import main

QUICK = ["--drafter", "ngram", "--repeats", "1", "--max-new-tokens", "24"]


@pytest.mark.slow
def test_bench_compares_a_lookup_with_that_of_transformers(capsys):
    assert main(["bench", *QUICK, "--assistant-tokens", "4"]) == 0
    told = capsys.readouterr().out
    assert "plain generate" in told and "assisted, 4" in told and "SSD" in told and "in turn" not in told


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [True, False])
def test_check_measures_a_lookup_and_computes_no_draft(capsys, as_json):
    assert main(["check", pair.folder("target"), *QUICK, *["--json"] * as_json]) in (0, 1)
    told = capsys.readouterr().out
    if as_json:
        found = json.loads(told)
        assert found["looks_up"] and found["speed"] > 0 and found["plain"] > 0
        assert found["assistant_tokens"] in ((None,) if found["skipped"] else (3, 5))  # left out on a busy machine
        assert found["trained"] is None and found["draft"] is None and found["verdict"].startswith(("yes", "no"))
    else:
        lines = told.strip().split("\n")
        assert [line.split()[0] for line in lines[-5:]] == ["acceptance", "times", "plan", "speed", "pays"]
        assert "for a verification, no draft" in told and "layer" not in "".join(lines[-5:])


@pytest.mark.slow
def test_a_chat_looks_up_what_was_said(capsys, monkeypatch):
    words = iter(["def f(x):\n    return x + 1\n\ndef f(x):\n    return x", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(words))
    assert main(["chat", "--drafter", "ngram", "--stats", "--max-new-tokens", "24"]) == 0
    told = capsys.readouterr().out
    assert "tokens/s" in told and ("acceptance" in told or "decoded plainly" in told)


@pytest.mark.parametrize("command", ["check", "chat", "bench"])
def test_a_draft_beside_a_lookup_is_refused(command, capsys):
    assert main([command, pair.folder("target"), pair.folder("draft"), "--drafter", "ngram"]) == 2
    assert 'SSDConfig(drafter="ngram") uses no draft model; leave out' in capsys.readouterr().err
