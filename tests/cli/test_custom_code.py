"""Models and tokenizers with code of their own: nobody is asked on the terminal whether to run it."""

import json

import pytest
import torch

import hf_ssd
from hf_ssd.cli import models
from hf_ssd.distributed.worker import load_model

from ..helpers.tiny import tiny_draft, tiny_model

CODE = "from transformers import PreTrainedTokenizerFast\n\n\nclass Own(PreTrainedTokenizerFast):\n    pass\n"


@pytest.fixture
def asked(monkeypatch):
    """The questions on the terminal, all answered with no."""
    questions = []
    monkeypatch.setattr("builtins.input", lambda question="": questions.append(question) or "n")
    return questions


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own.py").write_text(CODE)
    tokenizer = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    kinds = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": kinds}))
    return str(tmp_path)


def test_a_call_with_models_of_custom_code_does_not_ask(folder, asked):
    target, draft = hf_ssd.enable(tiny_model()), tiny_draft()
    target.config._name_or_path = draft.config._name_or_path = folder
    config = hf_ssd.SSDConfig(lookahead=2, asynchronous=False)
    target.generate(torch.tensor([[1, 5, 9]]), max_new_tokens=4, assistant_model=draft, ssd_config=config)
    assert asked == []


def test_the_worker_and_the_command_line_do_not_ask(folder, asked):
    settings = {"weights": None, "dtype": None, "load_options": {}, "path": folder, "device": "cpu"}
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_model(settings)
    model = models.Model(folder)
    with pytest.raises(ValueError, match="it brings code of its own, .* --trust-remote-code"):
        model.load()
    assert model.tokenizer is None
    assert asked == []
