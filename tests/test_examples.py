"""What a user runs, run as a user would."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_ssd

from .conftest import tiny_draft, tiny_model

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import train_parallel_draft  # noqa: E402


def run(*command, timeout=240):
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=timeout, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def table(output):
    """Returns the rows of quickstart's table by name: the columns behind it."""
    names = ("plain generate", "assisted generation", "SSD, synchronous", "SSD")
    return {n: re.search(rf"^{re.escape(n)}  +(.*)$", output, re.MULTILINE).group(1).split() for n in names}


def test_quickstart(fresh_python):
    output = run("examples/quickstart.py", "--max-new-tokens", "40", "--repeats", "1", "--lookahead=3", "--budget=12")
    assert "class Reader" in output
    rows = table(output)
    assert all(row[-1] == "yes" for row in rows.values())
    assert float(rows["SSD"][3]) > 1.5 and float(rows["SSD"][4]) > 0.5  # tokens per round, hit rate
    speedup, lowest, highest = (float(x) for x in re.findall(r"[\d.]+", " ".join(rows["SSD"][1:3])))
    assert lowest <= speedup <= highest and re.search(r"^Load before: [\d.]+ on \d+ cores\.", output, re.MULTILINE)


def test_generate_tp():
    ranks, drafts = 3, 1
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    options = ["--num-draft-ranks", str(drafts), "--max-new-tokens", "24", "--lookahead", "3", "--budget", "6"]
    output = run(*command, "examples/generate_tp.py", *options)
    assert output.count("class Reader:") == 1  # one rank prints
    assert f"{ranks - drafts} target ranks, {drafts} draft ranks" in output and "24 tokens in" in output


def test_quickstart_with_folders_and_sampling(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/pair/target")
    for name, model in (("target", tiny_model), ("draft", tiny_draft)):
        model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    output = run(
        "examples/quickstart.py", "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"),
        "--prompt", "import os", "--max-new-tokens", "12", "--temperature", "0.7", "--repeats", "1",
    )  # fmt: skip
    assert all(row[-1] == "sampled" for row in table(output).values())


@pytest.mark.parametrize("name, acceptance", [("draft", 0.5), ("parallel_draft", 0.2)])
def test_the_embedded_pair_writes_python_and_agrees(name, acceptance):
    pair = ROOT / "examples" / "pair"
    assert sum(path.stat().st_size for path in pair.rglob("*") if path.is_file()) <= 12e6
    target, draft = (AutoModelForCausalLM.from_pretrained(pair / one, dtype="float32") for one in ("target", name))
    assert AutoModelForCausalLM.from_pretrained(pair / "target").dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    inputs = tokenizer("def read_lines(path):\n", return_tensors="pt", return_token_type_ids=False)
    config = hf_ssd.SSDConfig(lookahead=4, asynchronous=False)
    output = hf_ssd.enable(target).generate(
        **inputs,
        max_new_tokens=64,
        do_sample=False,
        assistant_model=draft,
        ssd_config=config,
        return_dict_in_generate=True,
    )
    assert output.ssd_stats.acceptance_rate > acceptance
    text = tokenizer.decode(output.sequences[0])
    assert re.search(r"\b(return|self|if|for|def|import|raise)\b", text)


def test_train_pair_trains_and_saves_a_pair(tmp_path):
    output = run(
        "examples/train_pair.py", "--output", str(tmp_path), "--steps", "3", "--draft-steps", "3",
        "--on-policy-rounds", "1",
        "--batch-size", "2", "--length", "64", "--vocab-size", "300", "--num-threads", "1", "--max-files", "30",
    )  # fmt: skip
    assert "acceptance_rate_temperature_0" in output
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "draft").config.vocab_size == 300


def test_train_parallel_draft_trains_and_saves_a_draft_that_is_used_as_one(tmp_path):
    output = run(
        "examples/train_parallel_draft.py", "--output", str(tmp_path), "--rounds", "1", "--steps-per-text", "2",
        "--lookahead", "3", "--num-threads", "1", "--max-files", "30",
    )  # fmt: skip
    assert len(json.loads(output)["acceptance_by_position"]["parallel_temperature_1"]) == 3
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.pard_token == 2048


@pytest.mark.parametrize("hidden_from_others", [True, False])
def test_a_mask_token_learns_from_what_it_sees_in_use(hidden_from_others):
    draft = train_parallel_draft.with_mask_token(tiny_model())
    ids = torch.randint(2, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    followed, distance = train_parallel_draft.drop_mask_tokens(12, 4, 0.7, 0.4, torch.Generator().manual_seed(1))
    assert [(distance == d).sum().item() for d in range(4)] == [12, 5, 3, 3]  # of 8 tokens that may be followed
    if not hidden_from_others:  # the mutant
        followed = torch.where(distance > 0, 8, followed)
    logits, errors = train_parallel_draft.all_logits(draft, ids, followed, distance), []
    for node, (start, d) in enumerate(zip(followed.tolist(), distance.tolist())):
        alone = torch.cat([ids[:, : start + 1], torch.full((2, d), draft.config.pard_token)], dim=1)
        errors.append((draft(alone).logits[:, -1, :97] - logits[:, node]).abs().max().item())
    assert (max(errors) < 1e-4) == hidden_from_others


def test_importing_has_no_side_effects(fresh_python):
    program = """
import threading, transformers
generate, threads = transformers.GenerationMixin.generate, threading.active_count()
import hf_ssd
assert transformers.GenerationMixin.generate is generate and threading.active_count() == threads
"""
    run("-c", program)


@pytest.mark.parametrize("name", hf_ssd.__all__)
def test_every_public_name_is_documented(name):
    assert len(getattr(hf_ssd, name).__doc__) > 40
