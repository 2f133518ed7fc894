"""The benchmark, run as a user would, and what it makes of the figures."""

import json
from types import SimpleNamespace

import pytest
import torch

from hf_ssd import SSDStats, theory
from hf_ssd.cli import methods as ways
from hf_ssd.cli.table import parts_of, rows_of
from hf_ssd.rounds import AHEAD, IN_TURN, NGRAM, PREPARED, PRIMARY, RoundRecord

from .helpers.programs import ROOT, run


@pytest.mark.slow
def test_the_embedded_pair_with_everything_written(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("def main(", "import os\n")))
    output = run(
        "examples/benchmark.py", "--max-new-tokens", 16, "--repeats", 1, "--assistant-tokens", 3, "--lookahead", 3,
        "--in-turn-lookaheads", 3, "--budget", 6, "--prompts", prompts, "--prompt-field", "text", "--output", tmp_path,
        "--trace", tmp_path / "t.json",
    )  # fmt: skip
    for name in ("plain generate", "assisted, default", "SSD, in turn, 3 (best)", "Corollary 9"):
        assert name in output
    assert "NO" not in output
    report = json.loads((tmp_path / "benchmark.json").read_text())
    assert {"torch", "transformers", "hf_ssd"} <= set(report["versions"]) and report["arguments"]["lookahead"] == 3
    for rows in report["tables"].values():
        ssd = next(row for row in rows if row["method"] == "SSD")
        assert 0 < ssd["hit rate"] <= 1 and ssd["T_SD"] > 0 and ssd["measured / predicted"] > 0
        assert ssd["per device"] == pytest.approx(ssd["speed"] / 2)
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("benchmark.png", "t.png"))


@pytest.mark.slow
def test_a_batch_of_a_random_pair_sampled():
    output = run(
        "examples/benchmark.py", "--layered", "tiny", "--agreement", 0.7, "--temperature", 1, "--batch-size", 3,
        "--max-new-tokens", 12, "--repeats", 1, "--in-turn-lookaheads", 2, "--dtype", "float32", "--pin", 0, 1,
        "--one-table",
    )  # fmt: skip
    assert "assisted" not in output and "batch size 3, temperature 1" in output and "SSD over plain" in output


def method(speeds, devices=1, stats=None):
    runs = [
        SimpleNamespace(speed=speed, prefill=0.1, stats=stats, sequences=torch.tensor([[1, 2]])) for speed in speeds
    ]
    return SimpleNamespace(runs=runs, devices=devices)


def test_the_best_setting_counts_and_ratios_are_of_one_turn():
    seconds = {"verify_seconds": 0.1, "wait_seconds": 0.05, "answer_seconds": 0.05}
    stats = SSDStats(records=[RoundRecord(IN_TURN, 2, 0, [PREPARED], accepted=[2], received_at=0.2, **seconds)])
    methods = {
        "plain generate": method([10, 20, 40]),
        "assisted, default": method([10, 20, 40]),
        "assisted, 2": method([30, 30, 30]),  # over plain 3, 1.5, 0.75
        "assisted, 4": method([20, 40, 80]),  # over plain 2
        "SSD, in turn, 2": method([20, 40, 80], stats=stats),
        "SSD": method([30, 60, 120], devices=2, stats=stats),
    }
    rows = {row["method"]: row for row in rows_of(methods)}
    assert list(rows) == ["plain generate", "assisted, default", "assisted, 4", "SSD, in turn, 2", "SSD"]
    assert rows["assisted, 4"]["over plain"] == 2 and rows["SSD"]["over plain"] == 3
    assert rows["SSD"]["per device"] == 30 and rows["SSD"]["over in turn"] == 1.5
    assert rows["SSD"]["T_SD"] == pytest.approx(0.5)
    bound = theory.ssd_over_speculative_decoding_bound(0.5, 3, 3)
    assert rows["SSD"]["Corollary 9"] == pytest.approx(bound) == pytest.approx(1.5)
    assert rows["SSD"]["predicted"] == pytest.approx(theory.predict(stats))


def test_a_wait_beside_a_row_that_preferred_an_ngram_is_one_of_a_hit():
    rounds = [([PREPARED, NGRAM], 0.01), ([PRIMARY, NGRAM], 0.09), ([NGRAM, NGRAM], 0.09)]
    records = [
        RoundRecord(AHEAD, 2, 8, sources, accepted=[2, 2], verify_seconds=0.1, wait_seconds=wait, early=4)
        for sources, wait in rounds
    ]
    parts = parts_of(SimpleNamespace(speed=1.0, stats=SSDStats(2, records)))
    assert parts["wait on hits / verify"] == pytest.approx(0.1) and parts["hit rate"] == 0.5


def test_tokens_are_counted_to_the_end_of_each_text():
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[9, 8]))
    assert ways.new_tokens(torch.tensor([[1, 9, 9, 0], [1, 2, 3, 4], [8, 0, 0, 0]]), model) == 2 + 4 + 1


class Target:
    """A model whose `generate` is told a clock, and what it does between two lengths of its text."""

    def __init__(self, device, lengths, works):
        self.device, self.lengths, self.works = torch.device(device), lengths, works
        self.generation_config = SimpleNamespace(eos_token_id=None)

    def generate(self, input_ids, stopping_criteria, **options):
        for length in self.lengths:
            self.works()
            stopping_criteria(torch.ones(1, length, dtype=torch.long), None)
        return SimpleNamespace(sequences=torch.ones(1, 10, dtype=torch.long))


def one_run(target):
    args = SimpleNamespace(max_new_tokens=8, temperature=0, ignore_eos=False)
    bench = ways.Bench(args, target, None, None, [{"input_ids": torch.ones(1, 2, dtype=torch.long)}])
    return bench.run(ways.Method({}, None, 1), 0)


def test_what_an_accelerator_was_given_is_waited_for(monkeypatch):
    """generate() returns at once here, and its work is done when the device is waited for: a second later."""
    now, queue = [0.0], [5.0]  # of whatever ran before
    monkeypatch.setattr(ways.time, "perf_counter", lambda: now[0])

    def synchronize(device):
        now[0] += sum(queue)
        queue.clear()

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    assert one_run(Target("cuda", [3], lambda: queue.append(1.0))).seconds == 1.0


def test_tokens_of_the_first_round_are_not_counted_as_decoded_later(monkeypatch):
    """Assisted generation has four tokens after a second and eight after two; the mutant counts seven for the last."""
    now = [0.0]
    monkeypatch.setattr(ways.time, "perf_counter", lambda: now[0])
    run = one_run(Target("cpu", [6, 10], lambda: now.append(now.pop() + 1.0)))
    assert (run.first, run.prefill, run.speed) == (4, 1.0, 4.0)


@pytest.mark.parametrize("arguments, code", [([], 0), (["--output", "folder"], 2)])
def test_pictures_alone_need_matplotlib_and_say_so_first(arguments, code):
    program = "import sys; sys.modules['matplotlib'] = None; import benchmark; benchmark.parse_arguments()"
    said = run("-c", program, *arguments, status=code, cwd=ROOT / "examples")
    assert ("pictures need matplotlib: pip install" in said) == bool(code)
