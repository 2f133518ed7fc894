"""What cannot work is refused in a sentence, before models are loaded."""

import importlib.util
import re
import socket

import pytest
from transformers import LlamaConfig, MambaConfig, T5Config

from hf_ssd.cli import pair
from hf_ssd.cli.main import build_parser, main
from hf_ssd.cli.serve import NEEDED

from ..helpers.tiny import SIZES, VOCAB, tiny_draft, tiny_model
from ..helpers.vocabularies import TARGET, tokenizer
from .conftest import checked

EMBEDDED = f"{pair.folder('target')} {pair.folder('draft')}"
REFUSALS = {  # words that name things of the folder below, and the sentence
    "check {target} {draft} --draft {draft}": "There are two drafts",
    "check {target} {nowhere}": "nowhere'; give a folder with a model, or a hub id",
    "check {t5} {draft}": "t5 is a t5 model; only decoder-only",
    "check {target} {mamba}": "recurrent layers alone",
    "check {target} {larger}": f"{VOCAB} tokens and the draft one of {VOCAB + 400}",
    "check {target} {draft} --draft-device cuda:77": "no device 'cuda:77'",
    "check {target} {draft} --device gpu": "no device 'gpu'",
    "check {target} {draft} --prompts {nowhere}.jsonl": "nowhere.jsonl cannot be",
    "check {target} {draft} --prompts {none.jsonl}": "has no prompts in a field",
    f"check {EMBEDDED} --drafter ngram": 'SSDConfig(drafter="ngram") uses no draft model; leave out',
    f"chat {EMBEDDED} --drafter ngram": 'SSDConfig(drafter="ngram") uses no draft model; leave out',
    "chat --system Brief.": "--system needs a chat template",
    "chat {target} {nowhere}": "There is no folder",
    f"bench {EMBEDDED} --drafter ngram": 'SSDConfig(drafter="ngram") uses no draft model; leave out',
    "bench --output {none.jsonl}": "Nothing can be written to ",
    "bench --trace {none.jsonl}/trace.json": "Nothing can be written to ",
    "bench {mamba} {mamba}": "recurrent layers alone",
    "serve target draft --draft draft": "There are two drafts",
    "serve target --port 0": "DRAFT is missing: hf-ssd serve target DRAFT",
    "serve ./nowhere ./either --port 0": "There is no folder './nowhere'",
    "serve --port 99999": "Cannot listen on 127.0.0.1 port 99999",
}


@pytest.fixture(scope="module")
def things(tmp_path_factory):
    place = tmp_path_factory.mktemp("refused")
    larger = tiny_draft(vocab_size=VOCAB + 400)
    for name, model in (("target", tiny_model()), ("draft", tiny_draft()), ("larger", larger)):
        model.save_pretrained(place / name)
    tokenizer(TARGET).save_pretrained(place / "target")
    for name, config in (("t5", T5Config()), ("mamba", MambaConfig()), ("empty", LlamaConfig(**SIZES))):
        config.save_pretrained(place / name)
    (place / "none.jsonl").write_text('{"text": "import os"}\n')
    return place


def check_refusal(capsys, words: list[str], sentence: str) -> None:
    capsys.readouterr()  # bars of models that were saved
    assert main(words) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.startswith(f"hf-ssd {words[0]}: ") and "Traceback" not in error
    if words[0] == "check":
        code, found = checked(capsys, *words[1:])
        assert code == 2 and sentence in found["refused"] and found["pays"] is None


@pytest.mark.parametrize("words", REFUSALS)
def test_what_cannot_work_is_refused_in_a_sentence_before_models_load(words, things, nothing_loads, capsys):
    named = re.sub("{(.+?)}", lambda found: str(things / found[1]), words)
    check_refusal(capsys, named.split(), REFUSALS[words])


def test_weights_that_are_missing_are_named(things, capsys):
    check_refusal(capsys, ["check", str(things / "empty"), str(things / "empty")], "Cannot load a model from ")


def test_what_an_environment_or_a_package_lacks_is_named(nothing_loads, monkeypatch, tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        check_refusal(capsys, ["serve", "--port", port], f"Cannot listen on 127.0.0.1 port {port}")
    found = {name: importlib.util.find_spec(name) for name in NEEDED} | {"uvicorn": None}
    monkeypatch.setattr("importlib.util.find_spec", found.get)  # nor is there matplotlib
    check_refusal(capsys, ["serve"], 'serving needs uvicorn: pip install "hf_ssd[serve]"')
    check_refusal(capsys, ["bench", "--output", str(tmp_path)], "matplotlib")
    monkeypatch.setattr(pair, "PLACES", (tmp_path,))
    check_refusal(capsys, ["chat"], "name a TARGET and a DRAFT")


@pytest.mark.parametrize(
    "command, words, wrong",
    [
        ("chat", "--max-new-tokens --temperature --seed", ["0", "nan", "-1"]),
        ("check", "--max-new-tokens --repeats --seconds", ["7", "0", "inf"]),
        ("bench", "--batch-size --prompt-length --max-new-tokens --temperature", ["0", "0", "1", "-1"]),
        ("bench", "--lookahead --budget --in-turn-lookaheads", ["65", "0", "0"]),
        ("bench", "--assistant-tokens --repeats --pin", ["0", "0", "0 99999"]),
        ("serve", "--lookahead --budget --max-tokens --threads --draft-threads", ["0", "-2", "0", "0", "-1"]),
    ],
)
def test_numbers_that_an_option_cannot_have_are_refused(command, words, wrong, nothing_loads, capsys):
    for option, value in zip(words.split(), wrong, strict=True):
        with pytest.raises(SystemExit, match="2"):
            main([command, option, *value.split()])
        said = capsys.readouterr().err
        assert f"hf-ssd {command}: error: argument {option}: must" in said or f"argument {option}: this program" in said


def test_every_option_with_a_number_has_limits():
    commands = build_parser()._subparsers._group_actions[0].choices
    actions = [action for command in commands.values() for action in command._actions]
    assert {action.dest for action in actions if action.type in (int, float)} == {"port"}  # which is tried
