"""The command line as a whole, and its thinnest command."""

import importlib
import json
import subprocess
import sys

import pytest

import hf_ssd
from hf_ssd.cli import pair
from hf_ssd.cli.main import COMMANDS, build_parser, main


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


def test_the_version_and_a_missing_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert hf_ssd.__version__ in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([])


def test_bench_prints_tables_and_writes_figures(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('[{"text": "import os\\n"}, {"text": "def main("}]')
    words = ["bench", "--new-tokens", "12", "--repeats", "1", "--assistant-tokens", "3", "--in-turn-lookaheads", "3"]
    words += ["--prompts", str(prompts), "--prompt-field", "text", "--output", str(tmp_path), "--one-table"]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "SSD over plain generate" in output and "plain generate" in output and "NO" not in output
    report = json.loads((tmp_path / "benchmark.json").read_text())
    assert report["arguments"]["new_tokens"] == 12 and (tmp_path / "benchmark.png").stat().st_size > 5000


@pytest.mark.parametrize("words", [["bench", "--output", "folder"], ["bench", "nowhere", "nothing"]])
def test_bench_refuses_in_a_sentence(words, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("hf-ssd bench: ")


def test_a_package_without_the_pair_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pair, "PLACES", (tmp_path,))
    assert main(["chat"]) == 2 and "name a TARGET and a DRAFT" in capsys.readouterr().err


def test_a_chat_whose_input_ends_is_over():
    command = [sys.executable, "-m", "hf_ssd", "chat"]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
