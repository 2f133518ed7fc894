"""GGUF files as models: a path to one, or a folder that has one, wherever a model is named."""

import importlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hf_ssd
from hf_ssd.cli import pair
from hf_ssd.cli.main import main
from hf_ssd.cli.models import Model
from hf_ssd.drafting.heads import loading
from hf_ssd.drafting.resolver import config_at

from .conftest import checked, typed

FIXED = hf_ssd.SSDConfig(lookahead=3, budget=6)


def add_tokens(writer, vocab_size: int) -> None:
    """Adds the tokens of the small pair, whose first one begins and ends a text."""
    kinds, file = importlib.import_module("gguf").TokenType, Path(pair.folder("target"), "tokenizer.json")
    tokens = json.loads(file.read_text())["model"]
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(tokens["vocab"], key=tokens["vocab"].get))
    writer.add_token_types([kinds.CONTROL, *[kinds.NORMAL] * (vocab_size - 1)])
    writer.add_token_merges([" ".join(pair) for pair in tokens["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """The small pair's target as a file among several, and its draft as the only file of a folder."""
    pytest.importorskip("gguf")
    llama_gguf = importlib.import_module("examples.engines.llama_gguf")
    place, in_float32 = tmp_path_factory.mktemp("gguf"), tmp_path_factory.mktemp("float32")
    files = {"target": place / "target.gguf", "draft": place / "alone" / "draft.gguf"}
    files["draft"].parent.mkdir()
    for name, file in files.items():
        AutoModelForCausalLM.from_pretrained(pair.folder(name), dtype="float32").save_pretrained(in_float32 / name)
        llama_gguf.write(in_float32 / name, file, add_tokens)
    shutil.copy(files["draft"], place / "other.gguf")
    return {**{name: str(file) for name, file in files.items()}, "alone": str(place / "alone"), "several": str(place)}


@pytest.mark.slow
def test_a_chat_with_files_on_both_sides(files, monkeypatch, capsys):
    typed(monkeypatch, "class Reader:\n/quit\n")
    words = ["--max-new-tokens", "12", "--stats", "--lookahead", "3", "--budget", "6"]
    assert main(["chat", files["target"], files["draft"], *words]) == 0
    assert float(re.search(r"acceptance ([\d.]+)\]", capsys.readouterr().out)[1]) > 0.3


@pytest.mark.slow
def test_a_bench_of_files(files, tmp_path, capsys):
    words = ["--max-new-tokens", "12", "--repeats", "1", "--in-turn-lookaheads", "3", "--assistant-tokens", "3"]
    words += ["--lookahead", "3", "--budget", "6", "--one-table", "--output", str(tmp_path)]
    assert main(["bench", files["target"], files["draft"], *words]) == 0, capsys.readouterr().err
    (rows,) = json.loads((tmp_path / "benchmark.json").read_text())["tables"].values()
    assert all(row["same tokens"] for row in rows)
    assert rows[-1]["method"] == "SSD" and rows[-1]["acceptance"] > 0.3


@pytest.mark.slow
def test_a_check_names_the_files_as_the_user_does(files, capsys):
    code, found = checked(capsys, files["target"], files["alone"], "--repeats", "1", "--max-new-tokens", "16")
    assert code in (0, 1) and found["failure"] is None and found["acceptance"] > 0.3, found
    assert found["target"]["name"] == files["target"] and found["draft"]["name"] == files["alone"]
    model, tokenizer = Model(files["target"]).load_for_requests()  # of a server
    assert model.config.num_hidden_layers == 12 and tokenizer("import os")["input_ids"] == [514, 649]


@pytest.mark.slow
def test_a_draft_in_a_file_drafts_for_calls(files):
    target = AutoModelForCausalLM.from_pretrained(pair.folder("target"), dtype="float32")
    ids = torch.tensor([[410, 2047, 542, 26, 199, 259, 313]])
    plain = target.generate(ids, max_new_tokens=16, do_sample=False)
    draft = Path(files["draft"])
    hf_ssd.enable(target, draft, FIXED)
    options = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    target.generate(ids, **options)  # starts the worker
    try:
        with hf_ssd.launch_draft(files["alone"], dtype="float32") as assistant:
            outputs = [target.generate(ids, **options, assistant_model=one) for one in (assistant, None)]
    finally:
        hf_ssd.close(draft)
    for output in outputs:
        assert torch.equal(output.sequences, plain) and output.ssd_stats.draft_failure is None
    assert outputs[0].ssd_stats.acceptance_rate > 0.3 and outputs[0].ssd_stats.hit_rate > 0.2


def test_a_header_is_read_once_and_never_as_json(files, monkeypatch):
    """Reading the header of a file with a large vocabulary takes seconds, as does reading a file as text to its end."""
    reads, read = [], AutoConfig.from_pretrained
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *args, **more: reads.append(args) or read(*args, **more))
    for _ in range(3):
        configs = config_at(files["draft"]), Model(files["draft"])._config
        assert [config.num_hidden_layers for config in configs] == [2, 2]
    assert len(reads) <= 1
    reads.clear()
    kind = loading.PreTrainedConfig
    monkeypatch.setattr(kind, "get_config_dict", lambda path, **_: reads.append(path) or ({}, {}))
    assert loading.kind_of(files["draft"]) == (None, {})
    assert not reads


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("several", "has 2 GGUF files; name one of them, as in 'other.gguf'"),
        ("missing.gguf", "There is no file '{}'"),
        ("broken.gguf", "GGUF"),
    ],
)
def test_what_is_no_file_that_can_be_read_is_refused_in_a_sentence(files, name, sentence, tmp_path, capsys):
    (tmp_path / "broken.gguf").write_bytes(b"no model")
    path = files.get(name, str(tmp_path / name))
    for words in ([path, pair.folder("draft")], [pair.folder("target"), path]):
        assert main(["chat", *words]) == 2
        said = capsys.readouterr().err
        assert said.startswith("hf-ssd chat: ") and sentence.format(path) in said and len(said.splitlines()) == 1, said
    with pytest.raises(ValueError) as raised:
        hf_ssd.launch_draft(path)
    assert sentence.format(path) in str(raised.value)
