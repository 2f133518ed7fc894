"""The command line as a whole, and its thinnest command."""

import importlib
import sys

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects

import hf_ssd
from hf_ssd.cache import packed
from hf_ssd.cli import models
from hf_ssd.cli.main import COMMANDS, build_parser, main
from hf_ssd.distributed.cores import available_cores, pin

from .conftest import lets_assisted_generation_fail


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_parses(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    text = capsys.readouterr().out
    example = text.split("example:\n")[1].strip().split("\n")[0].split()
    assert example[:2] == ["hf-ssd", command]
    module = importlib.import_module(f"hf_ssd.cli.{command}")
    assert build_parser().parse_args(example[1:]).run is module.run
    assert module.__doc__.startswith(f"{COMMANDS[command]}\n")


@pytest.mark.slow
def test_bench_prints_a_table_of_a_pair_that_transformers_does_not_take(tmp_path, capsys, monkeypatch):
    lets_assisted_generation_fail(monkeypatch, AttributeError("a failure of transformers"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('[{"text": "import os\\n"}, {"text": "def main("}]')
    words = "--max-new-tokens 12 --repeats 1 --assistant-tokens 3 --in-turn-lookaheads 3 --one-table".split()
    assert main(["bench", *words, "--prompts", str(prompts), "--prompt-field", "text"]) == 0
    output = capsys.readouterr().out
    assert "SSD over plain generate" in output and "NO" not in output
    assert "assisted generation does not take this pair" in output


def test_options_that_several_commands_have_are_one_option():
    """Each has one name and one meaning in all commands that have it; `check` may end before its last turn."""
    commands = build_parser()._subparsers._group_actions[0].choices
    known = {}
    for command in commands.values():
        for action in command._actions:
            for name in action.option_strings or [action.dest]:
                known.setdefault(name, set()).add((action.dest, (action.help or "").split(";")[0], str(action.choices)))
    several = {"--prompts", "--max-new-tokens", "--repeats", "--lookahead", "--gguf-file", "--draft-revision", "target"}
    assert several < known.keys() and "--new-tokens" not in known
    assert {name: said for name, said in known.items() if len(said) > 1}.keys() <= {"--help", "-h", "--repeats"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_what_generate_and_from_pretrained_take(command, monkeypatch):
    words = "--dtype bf16 --draft-dtype auto --draft-tokenizer TOKENS --gguf-file A.gguf --draft-gguf-file B.gguf"
    words += " --revision v1 --draft-revision v2 --trust-remote-code --attn-implementation eager --drafter parallel"
    words += " --lookahead 3 --budget 7 --threads 1 --draft-threads 1 --tokenizer OTHER"
    args = build_parser().parse_args([command, "TARGET", "DRAFT", *words.split()])
    cores, given = available_cores(), []
    try:
        found = models.chosen(args)
        assert available_cores() == cores[:1] and torch.get_num_threads() == 1
    finally:
        pin(cores)
    trusted, cpu = {"trust_remote_code": True}, torch.device("cpu")
    target = {"revision": "v1", "gguf_file": "A.gguf", **trusted}
    assert found.target == models.Model("TARGET", cpu, "bfloat16", target, "OTHER", "eager")
    draft = {"revision": "v2", "gguf_file": "B.gguf", **trusted}
    assert found.draft == models.Model("DRAFT", cpu, "auto", draft, "TOKENS", None)
    assert found.config == hf_ssd.SSDConfig(drafter="parallel", lookahead=3, budget=7, verification="coupled")
    monkeypatch.setattr(hf_ssd, "launch_draft", lambda *name, **options: given.append((*name, options)))
    monkeypatch.setattr(packed, "own", given.append)
    found.launch_draft("OWNED")
    found.launch_draft("KEPT", owns_target=False, cores="CORES")
    draft |= {"device": cpu, "dtype": "auto"}
    assert given == [
        ("DRAFT", {"num_threads": 1, "cores": None, "target": "OWNED", **draft}),
        "OWNED",
        ("DRAFT", {"num_threads": None, "cores": "CORES", "target": "KEPT", **draft}),
    ]


def test_a_draft_of_the_hub_is_downloaded_where_bars_are_seen(monkeypatch, tmp_path):
    """Nothing is where there is no terminal, nor for a folder, and other copies of the weights are not either."""
    asked = []
    monkeypatch.setattr(models, "snapshot_download", lambda name, **options: asked.append((name, options)))
    drafts = [models.Model(name, files={"revision": "v2"}) for name in ("org/small", str(tmp_path))]
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        for draft in drafts:
            draft.fetch()
        assert len(asked) == is_terminal
    name, options = asked[0]
    files = ["model.safetensors", "model-00001-of-00002.safetensors", "consolidated.safetensors"]
    assert name == "org/small" and options["revision"] == "v2"
    assert [*filter_repo_objects(files, allow_patterns=options["allow_patterns"])] == files[:2]
