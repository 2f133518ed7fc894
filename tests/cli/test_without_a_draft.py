"""Commands without a draft model: `--drafter ngram`, and which drafts would pay for a target that has none."""

import pytest
import torch

from hf_ssd.cli import forms, pair
from hf_ssd.cli.main import main

from ..helpers.tiny import tiny_model
from .conftest import checked

SECONDS = {1: 10.0, 2: 10.0, 3: 10.0, 4: 11.0, 5: 11.0, 7: 12.0, 9: 13.0}


@pytest.mark.slow
def test_a_target_alone_is_told_which_drafts_would_pay(tmp_path, capsys):
    tiny_model(num_hidden_layers=4).save_pretrained(tmp_path)
    words = [str(tmp_path), "--max-new-tokens", "24", "--repeats", "1"]
    code, found = checked(capsys, *words)
    assert code == (0 if found["pays"] else 1) and found["target"]["layers"] == 4 and found["draft"] is None
    assert found["plain"] is None
    assert set(found["trained"]) == {"1", "2"} and found["verdict"] and found["ngrams"] > 0
    assert main(["check", *words]) in (0, 1)
    lines = [line.split()[0] for line in capsys.readouterr().out.strip().split("\n")]
    assert lines == ["target", "load", "times", "n-grams", "1-layer", "2-layer", "pays"]


def test_n_grams_are_counted_as_rounds_of_speculation():
    text = torch.tensor([[5, 6, 7, 8] * 5])
    # The first token comes from the prefill. Then each round gives three proposed tokens and one of the target.
    assert forms.tokens_a_round([(8, text)], 3) == 11 / 3
    assert forms.tokens_a_round([(2, torch.tensor([[1, 2, 3, 4, 5, 6]]))], 3) == 1.0
    assert forms.tokens_a_round([(6, torch.tensor([[1, 2, 3, 4, 5, 6]]))], 3) == 1.0  # nothing was generated


def test_a_trained_draft_is_as_fast_as_the_theory_says():
    # At acceptance 0.5 with lookahead 2: 1.75 tokens in a verification of 10 s and two steps of 1 s.
    only = {1: 10.0, 3: 10.0}
    assert forms.speed_of(0.5, 1.0, {**dict.fromkeys(SECONDS, 1e9), **only}) == pytest.approx(1.75 / 1.2)
    assert forms.speed_of(0.9, 1.0, SECONDS) > forms.speed_of(0.5, 1.0, SECONDS) > forms.speed_of(0.5, 5.0, SECONDS)


@pytest.mark.parametrize(
    "ngrams, speed, sentence",
    [
        (0.9, 0.9, "no: neither n-grams nor a trained draft would be faster"),
        (1.6, 1.4, "n-grams: 1.60 times plain decoding on these prompts"),
        (1.0, 1.4, "a trained 2-layer draft: 1.40 times plain decoding at acceptance 0.7"),
        (1.2, 1.4, "; n-grams give 1.20 without training"),
    ],
)
def test_the_verdict_names_the_best_form(ngrams, speed, sentence):
    trained = {1: {"seconds": 1.0, "needs": None, "speed": 0.5}, 2: {"seconds": 2.0, "needs": 0.4, "speed": speed}}
    found = forms.Forms(SECONDS, ngrams, 3, trained)
    assert sentence in found.verdict() and found.pays == (not sentence.startswith("no"))
    assert "1-layer     1000.0 ms for a draft token, never pays; 0.50 times" in found.in_words()
    assert "pays from acceptance 0.40 on" in found.in_words()


# ---------------------------------------------------------------- n-grams


QUICK = ["--drafter", "ngram", "--repeats", "1", "--max-new-tokens", "24"]


@pytest.mark.slow
def test_bench_compares_a_lookup_with_that_of_transformers(capsys):
    assert main(["bench", *QUICK, "--assistant-tokens", "4"]) == 0
    told = capsys.readouterr().out
    assert "plain generate" in told and "assisted, 4" in told and "SSD" in told and "in turn" not in told


@pytest.mark.slow
def test_check_measures_a_lookup_and_computes_no_draft(capsys):
    words = [pair.folder("target"), *QUICK]
    code, found = checked(capsys, *words)
    assert code in (0, 1) and found["looks_up"] and found["speed"] > 0 and found["plain"] > 0
    assert found["assistant_tokens"] in ((None,) if found["skipped"] else (3, 5))  # left out on a busy machine
    assert found["trained"] is None and found["draft"] is None and found["verdict"].startswith(("yes", "no"))
    assert main(["check", *words]) in (0, 1)
    told = capsys.readouterr().out
    lines = told.strip().split("\n")[-5:]
    assert [line.split()[0] for line in lines] == ["acceptance", "times", "plan", "speed", "pays"]
    assert "for a verification, no draft" in told and "layer" not in "".join(lines)


@pytest.mark.slow
def test_a_chat_looks_up_what_was_said(capsys, monkeypatch):
    words = iter(["def f(x):\n    return x + 1\n\ndef f(x):\n    return x", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(words))
    assert main(["chat", "--drafter", "ngram", "--stats", "--max-new-tokens", "24"]) == 0
    told = capsys.readouterr().out
    assert "tokens/s" in told and ("acceptance" in told or "decoded plainly" in told)
