"""The chat, typed as a user would, and what it keeps from turn to turn."""

import io
import re
import subprocess
import sys

import pytest
import torch

import hf_ssd
from hf_ssd.cache import packed
from hf_ssd.cli import models, pair
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


def test_what_the_text_no_longer_begins_with_is_dropped(chat):
    chat.answer("import os\nimport sys\n")
    cached = list(chat.cached)
    cache = chat._take_cache(cached[:6] + [cached[6] + 1] + cached[7:] + [5])
    assert cache.get_seq_length() == 6 and not chat.cached


PACKED = hf_ssd.SSDConfig(lookahead=3, budget=4, pack_weights=True)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["draft", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_a_chat_keeps_no_second_copy_of_packed_weights_unless_a_head_shares_them(draft, embedded, monkeypatch, capsys):
    owned, own, plain = [], packed.own, embedded[0]
    monkeypatch.setattr(packed, "own", lambda model: owned.append(model) or own(model))
    monkeypatch.setattr(models, "settings", lambda args: PACKED)
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n\ndef main(\n/stats\nimport sys\n/quit\n"))
    assert main(["chat", pair.folder("target"), pair.folder(draft), "--max-new-tokens", "24"]) == 0
    said = capsys.readouterr().out
    assert float(re.search(r"acceptance ([\d.]+)\]", said)[1]) > 0.2
    ids = embedded[2]("import os\n", return_tensors="pt")["input_ids"]
    tokens = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    assert embedded[2].decode(tokens[0, ids.shape[1] :], skip_special_tokens=True).rstrip() in said
    assert len(owned) == (draft == "draft")
    for model in owned:
        layers = [layer for layer in model.modules() if type(layer) is torch.nn.Linear]
        assert sum(bool(layer.weight.isnan().all()) for layer in layers) >= len(layers) - 1  # the head's may be shared
