"""A folder or draft that does not exist is named, in one sentence that says what to do."""

import pytest

import hf_ssd
from hf_ssd.cli import models

from ..helpers.families import tiny_config


@pytest.mark.parametrize("name", ["/nope", "./nope", "nope/it/is"])
def test_a_folder_that_is_missing_is_named(name):
    calls = {
        r"; SSDConfig.save_pretrained\(\) writes one with ssd_config.json.": lambda: hf_ssd.SSDConfig.from_pretrained(
            name
        ),
        "; give the draft's folder or hub id.": lambda: hf_ssd.launch_draft(name),
        "; give a folder with a model, or a hub id.": models.Model(name).load,
    }
    for advice, call in calls.items():
        with pytest.raises(ValueError, match=f"^There is no folder '{name}'{advice}$"):
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
