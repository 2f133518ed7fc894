"""What is missing or of no use is named in one sentence, and code of a model's own is run only where it is trusted."""

import json

import pytest
import torch

import hf_ssd
from hf_ssd.cli import models
from hf_ssd.distributed.worker import load_model

from ..helpers.families import tiny_config
from ..helpers.tiny import tiny_draft, tiny_model


@pytest.mark.parametrize("name", ["/nope", "./nope", "nope/it/is"])
def test_a_folder_that_is_missing_is_named(name):
    read = hf_ssd.SSDConfig.from_pretrained
    for call, advice in [
        (lambda: read(name), r"SSDConfig.save_pretrained\(\) writes one with ssd_config.json."),
        (lambda: hf_ssd.launch_draft(name), "give the draft's folder or hub id."),
        (models.Model(name).load, "give a folder with a model, or a hub id."),
    ]:
        with pytest.raises(ValueError, match=f"^There is no folder '{name}'; {advice}$"):
            call()


def test_a_folder_without_settings_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"/\w+' has no ssd_config.json; SSDConfig.save_pretrained\(\) writes it.$"):
        hf_ssd.SSDConfig.from_pretrained(tmp_path)
    hf_ssd.SSDConfig(lookahead=3).save_pretrained(tmp_path / "inner")
    assert hf_ssd.SSDConfig.from_pretrained(tmp_path, subfolder="inner").lookahead == 3


def test_an_object_that_is_no_draft_is_named():
    with pytest.raises(TypeError, match="launch_draft takes a transformers model, or a folder or hub id, not a int"):
        hf_ssd.launch_draft(42)
    with pytest.raises(TypeError, match="SSDConfig.from_pretrained takes a folder or hub id, not a int"):
        hf_ssd.SSDConfig.from_pretrained(42)


def test_a_folder_of_a_hybrid_without_a_tokenizer(tmp_path):
    """transformers makes a tokenizer that knows no text from its config."""
    tiny_config("qwen3_next").save_pretrained(tmp_path)
    assert models.Model(str(tmp_path)).tokenizer is None


# ---------------------------------------------------------------- code of a model's own

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
