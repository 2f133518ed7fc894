"""The folder `custom_generate` is a repository of the hub: transformers loads it, and its README says what it takes."""

import inspect
import re
from pathlib import Path

import pytest
import torch
import yaml

import hf_ssd
from tests.helpers.tiny import padded_batch, tiny_draft, tiny_model

FOLDER = Path(__file__).parent.parent / "custom_generate"


@pytest.mark.parametrize("is_enabled", [False, True])
def test_transformers_loads_the_folder(is_enabled):
    target, draft, inputs = tiny_model(), tiny_draft(), padded_batch(2)
    options = {"max_new_tokens": 12, "do_sample": False}
    plain = target.generate(**inputs, **options)
    if is_enabled:
        hf_ssd.enable(target)
    output = target.generate(
        **inputs, **options, custom_generate=str(FOLDER), trust_remote_code=True, assistant_model=draft,
        ssd_config={"lookahead": 3, "asynchronous": False}, return_dict_in_generate=True,
    )  # fmt: skip
    assert isinstance(output, hf_ssd.SSDDecoderOnlyOutput) and torch.equal(output.sequences, plain)
    assert output.ssd_stats.tokens_per_round > 0 and set(output.ssd_stats.column("mode")) == {"in_turn"}
    with pytest.raises(ValueError, match="assistant_model"):  # said by hf_ssd, so its requirements were met
        tiny_model().generate(**inputs, custom_generate=str(FOLDER), trust_remote_code=True)


def test_the_readme_has_what_the_hub_expects():
    _, head, text = (FOLDER / "README.md").read_text().split("---\n", 2)
    assert "custom_generate" in yaml.safe_load(head)["tags"]
    titles = "Description, Base model, Model compatibility, Additional arguments, Output type changes, Example"
    assert ", ".join(re.findall("^## (.*)$", text, re.MULTILINE)) == titles
    arguments = set(inspect.signature(hf_ssd.generate).parameters) - {"model", "inputs", "kwargs"}
    assert arguments | {"assistant_tokenizer"} == set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
