"""What a user runs, run as a user would."""

import functools
import re

import pytest
import quickstart
from transformers import AutoTokenizer

from .helpers.programs import PAIR, run
from .helpers.tiny import tiny_draft, tiny_model


def table(output):
    """Returns the rows of quickstart's table by name: the columns behind it."""
    names = ("plain generate", "assisted generation", "SSD, synchronous", "SSD")
    return {n: re.search(rf"^{re.escape(n)}  +(.*)$", output, re.MULTILINE).group(1).split() for n in names}


def test_quickstart_says_in_a_sentence_what_was_measured():
    say = functools.partial(quickstart.in_a_sentence, busy=False)
    assert say([1.5, 1.6, 1.7], True) == "hf_ssd wrote the text 1.60 times as fast as plain generate()."
    assert "0.90 times the speed of plain generate(): no gain" in say([0.85, 0.9, 0.95], True)
    assert "It cannot be said" in say([1.0, 7.99], True) and "differ by 699%" in say([1.0, 7.99], True)
    assert "OTHER tokens" in say([2.0, 2.0], False)
    assert "one measurement only" in say([6.69], True, busy=True)
    assert not quickstart.are_unsteady([1.0, 1.3], True) and quickstart.are_unsteady([1.0, 1.4], False)


@pytest.mark.slow
def test_quickstart():
    words = ["--max-new-tokens", "40", "--repeats", "50", "--seconds", "0.1", "--lookahead=3", "--budget=12"]
    output = run("examples/quickstart.py", *words)
    assert "class Reader" in output
    rows = table(output)
    assert all(row[-1] == "yes" for row in rows.values())
    assert float(rows["SSD"][3]) > 1.5 and float(rows["SSD"][4]) > 0.5  # tokens per round, hit rate
    speedup, (lowest, highest) = rows["SSD"][1], map(float, rows["SSD"][2].split("-"))
    assert lowest == highest  # after so few seconds, one round was measured
    assert speedup == "unsteady" or lowest <= float(speedup.rstrip("x")) <= highest
    said = r"^(hf_ssd wrote the text (at )?[\d.]+ times|It cannot be said)"  # a busy machine gains nothing
    assert re.search(said, output, re.MULTILINE)
    assert re.search(r"^Load before: [\d.]+ on \d+ cores\.", output, re.MULTILINE)


@pytest.mark.slow
def test_generate_tp():
    ranks, drafts = 3, 1
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    options = ["--num-draft-ranks", str(drafts), "--max-new-tokens", "24", "--lookahead", "3", "--budget", "6"]
    output = run(*command, "examples/generate_tp.py", *options)
    assert output.count("class Reader:") == 1  # one rank prints
    assert f"{ranks - drafts} target ranks, {drafts} draft ranks" in output and "24 tokens in" in output


@pytest.mark.slow
def test_quickstart_with_folders_and_sampling(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    for name, model in (("target", tiny_model), ("draft", tiny_draft)):
        model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    output = run(
        "examples/quickstart.py", "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"),
        "--prompt", "import os", "--max-new-tokens", "12", "--temperature", "0.7", "--repeats", "1",
    )  # fmt: skip
    assert all(row[-1] == "sampled" for row in table(output).values())


@pytest.mark.slow
def test_importing_has_no_side_effects(fresh_python):
    program = """
import threading, transformers
generate, threads = transformers.GenerationMixin.generate, threading.active_count()
import hf_ssd
assert transformers.GenerationMixin.generate is generate and threading.active_count() == threads
"""
    run("-c", program)


@pytest.mark.slow
def test_long_context():
    rows = re.findall(r"^\| ([\d,]+) +\| (\d+) \| (\d+) \| (\d+) \| ([-.\d]*) +\|$", run(
        "examples/long_context.py", "--contexts", "64", "2048", "--turns", "3"), re.MULTILINE)  # fmt: skip
    assert [row[0] for row in rows] == ["64", "2,048"] and all(int(number) > 0 for row in rows for number in row[1:4])


def test_second_turn():
    output = run("examples/second_turn.py", "--tokens", "200", "--answer", "8", "--repeats", "1")
    rows = dict(re.findall(r"^\| (read again|kept) \|.* (\d+) \|$", output, re.MULTILINE))
    assert rows == {"read again": "0", "kept": "207"} and "times as fast." in output


@pytest.mark.slow
def test_sampling_rules():
    output = run("examples/sampling_rules.py", "--temperatures", "0.7", "--batch-sizes", "2", "--max-new-tokens", "12")
    rows = re.findall(r"^0\.7 +2 +(with a worker|in turn) +([\d.]+) +([\d.]+) +([\d.]+)$", output, re.MULTILINE)
    assert [way for way, *_ in rows] == ["with a worker", "in turn"]
    assert all(float(ratio) == pytest.approx(float(coupled) / float(one), rel=0.01) for _, one, coupled, ratio in rows)
