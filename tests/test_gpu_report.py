"""The report that is made on GPUs, all of it on the CPU: minutes on a GPU are not to be lost to a typing error."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from types import SimpleNamespace

import gpu_report
import pytest
import torch
from gpu_parts import devices, rounds, speed
from gpu_parts import tests as gpu_tests
from gpu_parts.clock import Clock
from gpu_parts.results import MEASURED, NOT_REACHED, Report
from torch.autograd import DeviceType

from hf_ssd import SSDStats, theory
from hf_ssd.cli.methods import PLAIN, SSD, Method, Run
from hf_ssd.rounds import AHEAD, PREPARED, PRIMARY, RoundRecord

from .helpers.programs import ROOT, run

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def dry_run(folder):
    return ["examples/gpu_report.py", "--dry-run", "--output", str(folder)]


def read(folder):
    return json.loads((folder / "report.json").read_text()), (folder / "report.md").read_text()


# ---------------------------------------------------------------- as a user would


@pytest.mark.slow
def test_a_dry_run_does_all_of_it(tmp_path):
    run(*dry_run(tmp_path), "--seconds", 280, timeout=290, env=ENVIRONMENT)  # a busy machine is not what is tested
    data, text = read(tmp_path)
    assert data["under way"] is None and "Cut off" not in text and "say nothing about speed" in text
    assert {"torch", "transformers", "driver", "devices"} <= set(data["about"])
    assert data["tests"]["result"] == "passed" and data["tests"]["counts"]["passed"] >= 3
    has_compiler, cells = any(map(shutil.which, ("c++", "g++", "clang++"))), data["speed"]["cells"]
    for cell in cells:
        compiles = cell["method"] in (speed.COMPILED_PLAIN, speed.COMPILED_SSD)
        assert cell["result"] == MEASURED or (compiles and not has_compiler), cell
    methods = {PLAIN, SSD, speed.EAGER_SSD, speed.COMPILED_PLAIN, speed.COMPILED_SSD}
    methods |= {name for k in (3, 5, 8) for name in (f"SSD in turn, {k}", f"transformers' assisted, {k}")}
    assert methods <= {cell["method"] for cell in cells} and {cell.get("as plain", 1) for cell in cells} == {1}
    # It speculates, whatever the planner makes of so short calls on a busy machine; hits are looked at below.
    assert all(cell["tokens/round"] > 1 for cell in cells if cell["method"].startswith("SSD in turn"))
    for title in ("T = 0, 1 row", "T = 1, 1 row", "T = 0, 8 rows", "T = 1, 8 rows", "(best of 3)"):
        assert title in text
    [tables] = data["profile"]["pairs"].values()
    [projected] = [table for title, table in tables.items() if title.startswith("PROJECTED")]
    assert projected["over plain"] > 0 and tables["A round in a call, ms"]["hit rate"] > 0
    assert (tmp_path / "timeline.png").stat().st_size > 5000


@pytest.mark.slow
def test_a_target_that_several_devices_share(tmp_path):
    run(*dry_run(tmp_path), "--target-ranks", 2, "--only", "speed", "--max-new-tokens", 6, env=ENVIRONMENT)
    data, _ = read(tmp_path)
    assert "failed" not in data["speed"], (tmp_path / "ranks.txt").read_text()
    cells = {c["method"]: c for c in data["speed"]["cells"] if "T = 0, 8 rows" in c["setting"]}
    assert all(cell["result"] == MEASURED and cell["as plain"] == 1 for cell in cells.values())
    used = {name: cell["speed"] / cell["per device"] for name, cell in cells.items()}
    assert used == pytest.approx({PLAIN: 2, **{f"SSD in turn, {k}": 3 for k in (3, 5, 8)}, SSD: 3})
    assert data["about"]["target and draft share a device"] is False


@pytest.mark.slow
def test_what_was_done_before_it_was_killed_can_be_read(tmp_path):
    words = [*dry_run(tmp_path), "--only", "speed", "--turns", "1000", "--max-new-tokens", "4"]
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while MEASURED not in ((tmp_path / "report.json").read_text() if (tmp_path / "report.json").exists() else ""):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    data, text = read(tmp_path)
    results = [cell["result"] for cell in data["speed"]["cells"]]
    assert results.count(MEASURED) and results.count(NOT_REACHED)
    assert "Cut off, or still running: speed, tiny" in text and f"| {PLAIN} |" in text and NOT_REACHED in text


@pytest.mark.slow
def test_the_tests_for_gpus_pass_with_the_cpu_in_place_of_two():
    """What the dry run leaves out."""
    words = ["-m", "pytest", "tests/gpu", "-m", "gpu", "-k", "not oracle", "-q", "-o", "addopts="]
    assert "15 passed" in run(*words, env={**ENVIRONMENT, "HF_SSD_TEST_DEVICES": "cpu,cpu"})


# ---------------------------------------------------------------- what it decides


def test_what_it_cannot_do_is_said_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(devices, "accelerators", lambda: [])
    assert gpu_report.main(["--output", str(tmp_path / "folder")]) == 2
    assert "no GPU here" in (said := capsys.readouterr().err) and "--dry-run" in said
    assert not (tmp_path / "folder").exists()
    with pytest.raises(SystemExit) as refused:
        gpu_report.parse_arguments(["--output", str(tmp_path), "--target", "folder"])
    assert refused.value.code == 2 and "name both or neither" in capsys.readouterr().err


@pytest.mark.parametrize(
    "count, asked, ranks, draft, taken",
    [(1, None, 1, 0, 1), (2, None, 1, 1, 2), (3, None, 2, 2, 3), (8, None, 4, 4, 5), (8, 1, 1, 1, 2), (2, 4, 1, 1, 2)],
)
def test_who_gets_which_device(monkeypatch, count, asked, ranks, draft, taken):
    gpus = [torch.device("cuda", index) for index in range(count)]
    monkeypatch.setattr(devices, "accelerators", lambda: gpus)
    layout = devices.find_layout(False, asked)
    assert (layout.target, layout.draft, layout.target_ranks) == (gpus[0], gpus[draft], ranks)
    assert layout.devices == taken and layout.is_shared == (count == 1)


def test_one_part_alone_leaves_the_others_and_one_that_raises_too(tmp_path, monkeypatch):
    """main() without its effects on this process; the parts only note that they ran."""
    monkeypatch.setattr(signal, "signal", lambda *handler: None)
    for name in ("set_verbosity_error", "disable_progress_bar"):
        monkeypatch.setattr(gpu_report.logging, name, lambda: None)
    ran = []

    def part(name, args, layout, report, seconds):
        ran.append((name, seconds))
        report.begin(name, {"command": "pytest", "cells": [], "pairs": {}, "times": len(ran)})
        if name == "speed":
            raise RuntimeError("no room\nfor this")

    monkeypatch.setattr(gpu_report, "MEASURES", {name: partial(part, name) for name in gpu_report.MEASURES})
    dry = ["--output", str(tmp_path), "--dry-run"]
    assert gpu_report.main(dry) == 0
    assert [name for name, _ in ran] == ["tests", "speed", "profile"]
    assert [seconds for _, seconds in ran] == pytest.approx([110, 355, 460], abs=5)  # what the parts before have left
    assert gpu_report.main([*dry, "--only", "profile", "--seconds", "7"]) == 0
    assert ran[3:] == [("profile", pytest.approx(7, abs=1))]
    data, text = read(tmp_path)
    assert [data[name]["times"] for name in gpu_report.MEASURES] == [1, 2, 4]
    assert data["speed"]["failed"] == "RuntimeError: no room" and "ended early: RuntimeError: no room" in text
    Report(tmp_path, {"torch": "another"}).save()
    assert set(read(tmp_path)[0]) == {"about"}  # figures of different versions do not stand in one report


# ---------------------------------------------------------------- taking turns


class Bench:
    """Runs without models. Methods are told apart by their `speed`, which may be an error."""

    args = SimpleNamespace(temperature=0.0)
    target = None

    def __init__(self):
        self.order = []

    def run(self, method, turn):
        self.order.append((turn, method.options["speed"]))
        if isinstance(method.options["speed"], Exception):
            raise method.options["speed"]
        seconds = 10 / method.options["speed"] / (1 + turn)  # the machine gets faster
        return Run(11, 1, 0.0, seconds, None, torch.tensor([[1, 2, 3]]))


def cells_of(**speeds):
    names, cells = {"plain": PLAIN, "ssd": SSD, "compiled": speed.COMPILED_PLAIN, "broken": "broken"}, {}
    for key, value in speeds.items():
        record = {"setting": "T = 0", "method": names[key], "family": names[key], "result": NOT_REACHED}
        how = speed.LATE if key == "compiled" else {}
        cells[names[key]] = speed.Cell(Method({"speed": value}, None, 2), record, **how)
    return cells


def test_methods_take_turns_and_ratios_are_of_one_turn(tmp_path):
    cells, bench, report = cells_of(plain=10, ssd=25, compiled=20), Bench(), Report(tmp_path, {})
    records = {name: cell.record for name, cell in cells.items()}
    speed.take_turns(bench, cells, 3, report, Clock(60))
    assert bench.order[:6] == [(0, 10), (0, 25), (1, 10), (1, 25), (2, 10), (2, 25)]
    assert bench.order[6:8] == [(2, 20), (3, 10)]  # what compiles comes when the others have been measured
    assert records[SSD]["over plain"] == pytest.approx(2.5) and records[SSD]["error"] == pytest.approx(0)
    assert records[SSD]["turns"] == 6 and records[speed.COMPILED_PLAIN]["turns"] == 3
    assert records[speed.COMPILED_PLAIN]["over plain"] == pytest.approx(2)  # not by medians over different turns
    assert records[SSD]["per device"] == pytest.approx(records[SSD]["speed"] / 2)


def test_a_cell_that_raises_is_recorded_and_the_others_remain(tmp_path):
    cells, bench = cells_of(plain=10, broken=RuntimeError("CUDA out of memory\nand more"), ssd=30), Bench()
    records, report = [cell.record for cell in cells.values()], Report(tmp_path, {})
    report.begin("speed", {"cells": records})
    speed.take_turns(bench, cells, 2, report, Clock(60))
    report.now(None)
    assert [record["result"] for record in records] == [MEASURED, "failed: RuntimeError: CUDA out of memory", MEASURED]
    assert len([turn for turn, s in bench.order if isinstance(s, Exception)]) == 1
    assert "Not measured: broken (failed: RuntimeError: CUDA out of memory)." in read(tmp_path)[1]


def test_tests_that_take_too_long_are_cut_off(tmp_path):
    report = Report(tmp_path, {})
    gpu_tests.measure(SimpleNamespace(dry_run=True), None, report, 0.3)
    assert report.data["tests"]["result"].startswith("cut off") and report.data["tests"]["outcomes"] == {}
    found = gpu_tests.OUTCOME.findall("tests/gpu/a.py::test_b[one GPU] PASSED  [ 8%]\ntests/gpu/a.py::test_c FAILED\n")
    assert found == [("tests/gpu/a.py::test_b[one GPU]", "PASSED"), ("tests/gpu/a.py::test_c", "FAILED")]


# ---------------------------------------------------------------- what a round is made of


def test_the_projection_is_theorem_7_by_hand():
    seconds = {"verify_seconds": 0.03, "wait_seconds": 0.02}
    rows = ((3, PREPARED), (3, PREPARED), (1, PRIMARY))
    stats = SSDStats(records=[RoundRecord(AHEAD, 3, 4, [source], accepted=[k], **seconds) for k, source in rows])
    times = {"plain": 8.0, "verify": 10.0, "prepare": 14.0, "answer": 1.0, "drafting": 6.0}
    projected = rounds.projection(stats, times)
    # A hit waits for 4 ms of preparing and 1 ms of answer.
    over_verification = theory.ssd_speedup(2 / 3, 4, 2, 1.5, 0.6)
    assert projected["tok/s"] == pytest.approx(over_verification / 0.010)
    assert projected["over plain"] == pytest.approx(over_verification * 0.8)
    assert projected["over this call's measured speed"] == pytest.approx(projected["tok/s"] / theory.predict(stats))
    assert stats.column("verify_seconds") == [0.03] * 3  # what was measured stays


def event(key, kind=DeviceType.CPU, host=0.0, device=0.0, count=1, is_user_annotation=False):
    return SimpleNamespace(
        key=key, device_type=kind, self_cpu_time_total=host, self_device_time_total=device, count=count,
        is_user_annotation=is_user_annotation,
    )  # fmt: skip


def test_what_the_profiler_saw_is_told_apart():
    events = [
        event("aten::mm", host=300, device=900, count=4),  # the kernel's time, which the kernel has too
        event("gemm", DeviceType.CUDA, device=900, count=4),
        event("Memcpy DtoH (Device -> Pageable)", DeviceType.CUDA, device=100, count=2),
        event("a step", DeviceType.CUDA, device=1e6, is_user_annotation=True),
        event("cudaLaunchKernelExC", host=50, count=4),
        event("cudaStreamSynchronize", host=700, count=2),
        event("aten::_local_scalar_dense", host=10, count=2),
    ]
    seen = rounds.summary(SimpleNamespace(key_averages=lambda: events), 2)
    expected = {
        "device: ms in kernels": 0.5,
        "device: kernels": 3,
        "host: ms to launch": 0.025,
        "host: launches": 2,
        "host: ms in operators": 0.155,
        "host: ms waiting for the device": 0.35,
        "host: waits for the device": 1,
        "copies from the device to the host": 1,
        "operators whose result the host needs": 1,
    }
    assert seen == pytest.approx(expected)


def test_places_that_wait_are_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def call(**options):
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally ...)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    found = rounds.places_that_wait(call)
    assert found.pop("in all") == 3 and modes == ["warn", "default"]
    [(place, count)] = found.items()
    assert place.startswith("tests/test_gpu_report.py:") and count == 3
