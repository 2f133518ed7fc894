"""The doctor: what it refuses, what it measures, and what it says."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from hf_ssd import SSDConfig
from hf_ssd.cache import packed, packed_linear
from hf_ssd.cli import check, doctor, pair
from hf_ssd.cli.check import colored
from hf_ssd.cli.doctor import fastest
from hf_ssd.cli.main import main
from hf_ssd.cli.methods import Bench
from hf_ssd.cli.models import Model, Models
from hf_ssd.cli.verdict import Figures
from hf_ssd.planning.experience import CallKind
from hf_ssd.planning.planner import Planner

from ..helpers.families import sharp_model, tiny_config
from ..helpers.tiny import VOCAB, tiny_draft, tiny_model
from .conftest import checked, lets_assisted_generation_fail

ROOT = Path(__file__).parents[2]
QUICK = ["--repeats", "1", "--max-new-tokens", "24"]


def folder(path, model) -> str:
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def useless(tmp_path_factory):
    """A target of one layer and a deeper draft that knows nothing of it."""
    place = tmp_path_factory.mktemp("useless")
    models = {"target": tiny_model(num_hidden_layers=1), "draft": tiny_model(seed=5, num_hidden_layers=6)}
    return [folder(place / name, model) for name, model in models.items()]


# ---------------------------------------------------------------- what is measured


def test_five_lines_for_people_of_a_pair_that_only_we_take(capsys, tmp_path, monkeypatch):
    """No draft step was timed, either."""
    lets_assisted_generation_fail(monkeypatch, ValueError("other tokenizers"))
    monkeypatch.setattr(doctor, "fastest", lambda *_: "bfloat16")
    monkeypatch.setattr(check, "last_planner", lambda *_: Planner(CallKind(SSDConfig(), 1, VOCAB)))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "import os\\n"}\n{"prompt": "def main("}\n')
    code = main(["check", *QUICK, "--prompts", str(prompts)])
    output = capsys.readouterr().out
    assert "\033" not in output and code in (0, 1) and not re.search(r"\bnan\b", output, re.IGNORECASE)
    assert "no draft step was timed" in output and "assisted generation does not take this pair" in output
    lines = output.strip().split("\n")
    words = "target draft memory load dtype acceptance times plan speed pays"
    assert [line.split()[0] for line in lines] == words.split()
    assert all("on cpu in float32" in line for line in lines[:2])
    assert re.fullmatch(r"pays +(yes|no): .*", lines[-1]) and lines[-1].split()[1] == ("no:" if code else "yes:")


@pytest.mark.parametrize("command", ["check", "bench"])
def test_only_the_worker_loads_its_draft_and_the_target_keeps_its_weights(command, monkeypatch):
    seen = []
    monkeypatch.setattr(packed, "own", lambda model: pytest.fail("plain generate() is to be measured"))
    monkeypatch.setattr(Bench, "run", lambda bench, *_: seen.append(bench.assistant) or sys.exit())
    with pytest.raises(SystemExit):
        main([command, "--max-new-tokens", "8"])
    assert [(one.path, one.weights) for one in seen] == [(pair.folder("draft"), None)]


def test_an_eagle3_head_is_measured_beside_its_target(capsys):
    code, found = checked(capsys, pair.folder("target"), pair.folder("eagle3"), *QUICK)
    assert code in (0, 1) and found["failure"] is None and 0.3 < found["acceptance"] <= 1
    assert found["draft"]["target_layers"] == [2, 6, 11] and found["draft"]["parameters"] < 2e6


def test_a_draft_that_does_not_pay(useless, capsys):
    """Random models have no tokenizer, so random tokens are the prompts."""
    code, found = checked(capsys, *useless, *QUICK)
    assert code == 1 and not found["pays"] and found["verdict"].startswith("no: ")
    assert found["acceptance"] is None or found["acceptance"] < 0.3


@pytest.mark.slow
def test_a_hybrid_pair(tmp_path, capsys):
    config, tokenizer = tiny_config("qwen3_next"), AutoTokenizer.from_pretrained(pair.folder("target"))
    config.vocab_size = len(tokenizer)
    folders = [folder(tmp_path / name, sharp_model(config)) for name in ("target", "draft")]
    for place in folders:
        tokenizer.save_pretrained(place)
    code, found = checked(capsys, *folders, *QUICK)
    assert code in (0, 1) and found["verdict"] and found["failure"] is None and found["acceptance"] in (1, None)
    assert "recurrent" in found["draft"]["attention"] and found["assisted"] is None


def test_a_chat_template_makes_prompts_messages(monkeypatch, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(pair.folder("target"))
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    for name, model in (("target", tiny_model), ("draft", tiny_draft)):
        model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    prompts, seen = tmp_path / "prompts.jsonl", []
    prompts.write_text('{"prompt": "import os"}\n')
    monkeypatch.setattr(Bench, "run", lambda bench, method, turn: seen.append(bench.batches) or sys.exit())
    with pytest.raises(SystemExit):
        main(["check", str(tmp_path / "target"), str(tmp_path / "draft"), "--prompts", str(prompts)])
    assert tokenizer.decode(seen[0][0]["input_ids"][0]) == "[user]import os[assistant]"


def test_what_is_known_before_weights_are_loaded(tmp_path):
    """Windows, and a mask token in a config; the weights are not there to be read."""
    target = folder(tmp_path / "target", tiny_model("gemma"))
    draft = folder(tmp_path / "draft", tiny_model("mistral", pard_token=5))
    for name in (target, draft):
        (Path(name) / "model.safetensors").unlink()
    known = doctor.examine(Models(Model(target), Model(draft)))
    assert known["target"]["attention"] == "full and windows of 6 tokens" and "pard_token" not in known["target"]
    assert known["draft"]["attention"] == "windows of 6 tokens" and known["draft"]["pard_token"] == 5
    assert known["target"]["parameters"] == tiny_model("gemma").num_parameters() and known["shares_memory"]
    words = doctor.in_words(known).split("\n")
    assert "parallel (mask token 5)" in words[1] and "both models share one device's memory" in words[2]

    for other, is_shared in (("cuda:0", True), ("cuda:1", False), ("cpu", False)):
        models = Models(Model("a", torch.device("cuda")), Model("b", torch.device(other)))
        assert models.shares_memory == is_shared


# ---------------------------------------------------------------- the dtype that a processor computes fastest


@pytest.mark.parametrize(
    "float32, bfloat16, expected",  # seconds of a step and of a verification
    [
        ((2.0, 2.0), (1.0, 1.0), "bfloat16"),
        ((1.0, 1.0), (2.0, 2.0), "float32"),
        ((1.0, 1.0), (1.1, 1.1), None),
        ((1.1, 1.1), (1.0, 1.0), None),
        ((1.0, 1.0), (0.5, 2.0), None),  # half of the bytes, but no instructions for them
    ],
)
def test_the_faster_dtype_is_named_where_it_is_faster_for_steps_and_verifications(
    monkeypatch, float32, bfloat16, expected
):
    seconds, shapes, model = {torch.float32: float32, torch.bfloat16: bfloat16}, set(), tiny_model()
    monkeypatch.setattr(doctor, "seconds_of", lambda shape, _, dtype: shapes.add(shape) or seconds[dtype])
    assert fastest(model, torch.device("cpu")) == expected and fastest(model, torch.device("cuda")) is None
    mlp = model.model.layers[0].mlp
    assert shapes <= {tuple(layer.weight.shape) for layer in (mlp.up_proj, mlp.down_proj)}  # the largest layers


@pytest.mark.parametrize("has_operation, expected", [(True, "float32"), (False, "bfloat16")])
def test_the_dtype_is_that_of_the_products_of_a_call(has_operation, expected, monkeypatch):
    """Packed weights win in float32 alone, and without the operation bfloat16 does."""
    computed, product, linear = [], packed_linear._product, packed_linear.linear

    def noted(kind, call):
        return lambda states, *others: computed.append((kind, states.dtype)) or call(states, *others)

    def trial(weights, bias):
        return packed_linear.Verdict((weights[0].dtype == torch.float32,) * 3, 1)

    def seconds(layers, device, states):
        computed.clear()
        layers(states)
        (key,) = {*computed}
        return {("packed", torch.float32): 1.0, ("plain", torch.float32): 3.0, ("plain", torch.bfloat16): 2.0}[key]

    monkeypatch.setattr(packed_linear, "_product", noted("packed", product))
    monkeypatch.setattr(nn.functional, "linear", noted("plain", linear))
    monkeypatch.setattr(packed_linear, "_verdicts", {})
    monkeypatch.setattr(packed_linear, "_try", trial)
    monkeypatch.setattr(packed, "LEAST", 0)
    monkeypatch.setattr(doctor, "time_of", seconds)
    if not has_operation:
        monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert fastest(tiny_model(), torch.device("cpu")) == expected


def test_seconds_of_dtypes_are_those_of_equally_many_layers(monkeypatch):
    """Of smaller weights, more layers are computed, so that they do not fit into the processor's caches."""
    assert min(doctor.seconds_of((64, 32), 2, torch.bfloat16)) > 0
    computed, linear = [], nn.functional.linear

    def two_seconds_each(layers, device, states):
        computed.clear()
        layers(states)
        return 2.0 * len(computed)

    monkeypatch.setattr(nn.functional, "linear", lambda *inputs: computed.append(inputs) or linear(*inputs))
    monkeypatch.setattr(doctor, "UNCACHED", 2**14)
    monkeypatch.setattr(doctor, "time_of", two_seconds_each)
    counts = []
    for dtype in (torch.float32, torch.bfloat16):
        assert doctor.seconds_of((64, 32), 28, dtype) == [2.0, 2.0]
        counts.append(len(computed))
    assert counts == [3, 5]


def test_advice_is_given_where_the_model_has_another_dtype():
    model = {"name": "a", "family": "llama", "parameters": 1, "layers": 1, "attention": "full", "vocabulary": 9}
    known = {"target": {**model, "device": "cpu", "dtype": "float32"}, "fastest_dtype": "bfloat16"}
    assert "computes bfloat16 faster than float32: --dtype bfloat16" in doctor.in_words(known)
    assert "dtype" not in doctor.in_words({**known, "fastest_dtype": "float32"})
    assert "0.90 running programs for each core, a busy machine" in doctor.in_words({**known, "load": 0.9})
    assert "busy" not in doctor.in_words({**known, "load": 0.1})


# ---------------------------------------------------------------- what is said


def figures(**changes) -> Figures:
    usual = {
        "acceptance": 0.8, "hit_rate": 0.9, "tokens_per_round": 3.1, "verify_seconds": 0.010, "step_seconds": 0.002,
        "two_tokens_seconds": 0.004, "contention": 1.0, "plan": "a plan", "drafts": True, "predicted": 190.0,
        "speed": 180.0, "plain": 100.0, "assisted": 120.0, "over_plain": 1.8, "over_assisted": 1.5,
        "assistant_tokens": 3, "shares_memory": False, "load": 0.0,
    }  # fmt: skip
    return Figures(**{**usual, **changes})


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({}, "yes: 1.80 times plain decoding"),
        ({"over_assisted": 0.8}, "yes: 1.80 times plain decoding; assisted generation is faster still, with 3 tokens"),
        ({"failure": "it died"}, "no: the draft was given up (it died)"),
        ({"over_plain": 0.9, "acceptance": 0.1}, "no: the target accepts 10% of the drafted tokens; "),
        ({"over_plain": 0.9, "two_tokens_seconds": 0.014}, "no: the draft needs 1.4 verifications for two tokens; a "),
        ({"over_plain": 0.9, "contention": 1.5}, "no: a verification takes 1.5 times as long while the draft works"),
        ({"over_plain": 0.8, "two_tokens_seconds": 0.03, "load": 2.0}, "no: the draft needs 3.0 verifications"),
        ({"over_plain": 0.8, "load": 2.0}, "the machine is busy"),
        ({"over_plain": 0.9, "load": 0.9, "shares_memory": True}, ", but the machine is busy with other programs"),
        ({"over_plain": 0.9, "shares_memory": True}, "; both models share one memory, and a draft on a "),
        ({"over_plain": 1.02}, "no: 1.02 times plain decoding; a draft that agrees more or a smaller one"),
        ({"drafts": False, "over_plain": None}, "no: plain decoding is faster; a draft that agrees more or a smaller"),
    ],
)
def test_the_verdict_says_why_and_what_would_pay(changes, sentence):
    found = figures(**changes)
    assert sentence in found.verdict() and found.pays == found.verdict().startswith("yes")
    assert len(found.in_words().split("\n")) == 5


def test_a_run_that_decoded_plainly_has_no_ratio_to_plain_decoding_and_no_rate_of_its_rounds():
    plain = {"acceptance": 0.43, "hit_rate": 0.0, "tokens_per_round": 1.0, "drafts": False, "over_plain": 1.62}
    words = figures(**plain).in_words()
    assert "1.62" not in words and "0.00" not in words and "decoded plainly" in words
    assert "0.43 of the drafted tokens" in words
    assert "no token was drafted" in figures(**{**plain, "acceptance": None}).in_words()


def test_colours_are_for_terminals(monkeypatch):
    assert colored("one\ntwo", True) == "one\ntwo"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert colored("one\ntwo", True) == "one\n\033[32mtwo\033[0m" and "\033[31m" in colored("one", False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert colored("one\ntwo", True) == "one\ntwo"
