"""The smaller programs that measure, run as a user would."""

import ast
import configparser
import importlib
import json
import random
import re
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_ssd.drafting.heads.eagle3 import Eagle3Head

from .helpers.families import sharp_model, tiny_config
from .helpers.programs import ROOT, run


def program(name):
    """A program as a module: what it is made of."""
    return importlib.import_module(name)


def test_a_head_is_loaded_for_its_target_and_not_as_a_model_of_random_weights():
    workload = program("workload")
    folders = {"target": workload.PAIR / "target", "draft": workload.PAIR / "eagle3"}
    _, draft, _ = workload.load_pair(SimpleNamespace(**folders, dtype="float32", layered=None, compile=False))
    assert isinstance(draft, Eagle3Head)


@pytest.mark.slow
def test_sweep(tmp_path):
    figures = tmp_path / "sweep.json"
    said = run(
        "examples/sweep.py", "--max-new-tokens", 12, "--repeats", 1, "--comparisons", 2, "--finalists", 1,
        "--lookaheads", 2, "--budgets", 4, "--output", figures,
    )  # fmt: skip
    figures = json.loads(figures.read_text())
    in_turn_here = "lookahead 2, in turn, here"
    settings = {"plain generate", "planned", "lookahead 2, budget 4", "lookahead 2, in turn", in_turn_here}
    assert {row["setting"] for row in figures["rows"]} == settings
    finalist = next(row["setting"] for row in figures["rows"] if row["setting"] not in ("planned", in_turn_here))
    compared = {row["setting"]: row["is_finalist"] for row in figures["comparison"]}
    assert compared == {"plain generate": False, in_turn_here: False} | {finalist: True}
    assert len(re.findall(r"the planner reaches [\d.]+ \+- [\d.]+ of ", said)) == len(compared)


@pytest.mark.parametrize("option, number", [("repeats", 0), ("warm-up", 0), ("comparisons", 1), ("finalists", 0)])
def test_a_sweep_of_too_few_turns_is_refused(option, number, monkeypatch, capsys):
    sweep = program("sweep")
    monkeypatch.setattr(sys, "argv", ["sweep.py", f"--{option}", str(number)])
    with pytest.raises(SystemExit) as refused:
        sweep.parse_arguments()
    assert refused.value.code == 2 and f"--{option} " in capsys.readouterr().err


def test_the_best_setting_is_not_one_that_was_lucky():
    """Of settings that differ by chance none is better than the planner. The mutant compares in the turns that pick."""
    sweep, chance = program("sweep"), random.Random(0)
    found, lucky, beyond = [], [], 0
    names = [sweep.AUTO, *map(str, range(12))]
    for _ in range(200):
        picks, others = (
            {name: [{"speed": chance.gauss(1.0, 0.1)} for _ in range(6)] for name in names} for _ in range(2)
        )
        [best] = sweep.best_of(picks, names[1:], 1)
        share, error = sweep.share_of(others, best)
        found.append(share)
        beyond += abs(share - 1) > 2.57 * error  # of six turns, by Student's distribution, in 5 of 100 sweeps
        lucky.append(sweep.share_of(picks, best)[0])
    assert abs(statistics.mean(found) - 1) < 0.02 and statistics.mean(lucky) < 0.95
    assert 2 <= beyond <= 22


def test_no_setting_always_comes_after_the_same_one():
    sweep, settings = program("sweep"), dict.fromkeys("abcdef", {})
    orders = ["".join(name for name, _ in sweep.order_of(settings, turn)) for turn in range(20)]
    assert all(sorted(order) == list("abcdef") for order in orders)
    for name in settings:
        before = {order[order.index(name) - 1] if order[0] != name else "" for order in orders}
        assert len(before) > 3  # the mutant, always the same order: 1


@pytest.mark.slow
def test_profile_round():
    said = run(
        "examples/profile_round.py", "--layered", "tiny", "--agreement", 0.8, "--lookahead", 2, "--budget", 4,
        "--max-new-tokens", 30,
    )  # fmt: skip
    parts = dict(re.findall(r"^((?:target|draft): .*?) +(-?[\d.]+|nan)$", said, re.MULTILINE))
    assert float(parts["target: forward of 3 tokens, alone"]) > 0
    assert float(parts["draft: to answer on a hit, alone"]) > 0


@pytest.mark.slow
def test_refeeds(tmp_path):
    sharp_model(tiny_config("qwen3_next")).save_pretrained(tmp_path)
    arguments = "--dtype", "float32", "--acceptance", 0.0, "--rounds", 6, "--repeats", 1, "--limits", 1, 1000
    said = run("examples/refeeds.py", "--target", tmp_path, *arguments)
    rows = dict(re.findall(r"^ +(\d+) +[\d.]+ +[\d.]+ +([\d.]+) ", said, re.MULTILINE))
    # A token is gained in each round: 0 to 5 are fed again, or 0, 1, and then none or one, after a commit.
    assert rows == {"1": "0.5", "1000": "2.5"}


@pytest.mark.slow
def test_regression(tmp_path):
    kept, case = tmp_path / "before.json", "embedded pair, greedy"
    said = run("examples/regression.py", "--cases", case, "--repeats", 2, "--keep", kept)
    before = json.loads(kept.read_text())
    assert re.search(r"x plain \([\d.]+ to [\d.]+\)", said) and "Load before: " in said
    kept.write_text(json.dumps({case: {name: [100 * x for x in ratios] for name, ratios in before[case].items()}}))
    said = run("examples/regression.py", "--cases", case, "--repeats", 2, "--compare", kept)
    assert re.search(r" 0\.\d\d of before: no verdict from fewer than 5 turns", said)


def test_a_verdict_takes_turns_that_differ_less_than_the_runs():
    verdict, turns = program("regression").verdict, [1.0, 1.1, 1.2, 1.3, 1.4]
    assert verdict(turns, [x / 2 for x in turns])[1] == "slower"
    assert verdict(turns, [2 * x for x in turns])[1] == "faster"
    assert verdict(turns, [x + 0.1 for x in turns])[1] == "as before"
    assert "no verdict" in verdict(turns, turns[:4])[1] and "no verdict" in verdict(turns[:4], turns)[1]


@pytest.mark.parametrize(
    "load, turns, is_busy", [(0.3, [[1.0, 1.1], [2.0, 2.0]], False), (4.2, [[1.0]], True), (0.3, [[1.0, 1.5]], True)]
)
def test_a_busy_machine_is_warned_of(load, turns, is_busy, monkeypatch, capsys):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    program("workload").say_how_busy(load, turns)
    shown = capsys.readouterr().out
    assert f"Load before: {load} on 8 cores" in shown and ("WARNING" in shown) == is_busy


@pytest.mark.parametrize("prompts", ["none.jsonl", "tests"])
def test_a_file_of_prompts_that_is_not_there_is_said_before_anything_is_loaded(prompts, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    benchmark = program("benchmark")
    with pytest.raises(SystemExit):
        benchmark.parse_arguments(["--prompts", prompts])
    assert f"There is no file '{prompts}'." in capsys.readouterr().err
    assert benchmark.parse_arguments(["--prompts", "somebody/prompts"])  # of the hub


# ---------------------------------------------------------------- what the programs need


def names_in(requirements: str) -> set[str]:
    return set(re.findall(r"^[\w-]+", requirements, re.MULTILINE))


def imported_by(node: ast.AST) -> list[str]:
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    modules += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
    return [module.partition(".")[0] for module in modules]


ENGINES = ROOT / "examples" / "engines"  # run in environments of their own, without this package
PROGRAMS = sorted(path for path in (ROOT / "examples").rglob("*.py") if path.parent != ENGINES)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_starts_with_the_package_alone_and_needs_no_more_than_an_extra(path):
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    extras = {name: names_in(text) for name, text in settings["options.extras_require"].items()}
    here = {part for other in PROGRAMS for part in (other.stem, other.parent.name)}
    installed = names_in(settings["options"]["install_requires"]) | sys.stdlib_module_names | here
    installed |= {"hf_ssd", "tokenizers", "safetensors", "filelock"}  # transformers and torch need the latter three
    tree = ast.parse(path.read_text())
    later = {name for node in ast.walk(tree) for name in imported_by(node)} - installed
    at_start = {name for node in tree.body for name in imported_by(node)} - installed
    is_metric = "metrics" in path.parts  # which `evaluate` loads
    assert any(later <= names for names in extras.values()) and (is_metric or not at_start)
    assert "from tqdm import" not in path.read_text()  # tqdm.auto, which notebooks draw


def test_a_way_that_an_engine_refuses_is_named_with_its_error_beside_the_others(monkeypatch, tmp_path):
    engines = program("compare_engines")
    runner = tmp_path / "run_it.py"
    monkeypatch.setitem(engines.ENGINES, "it", engines.Engine(str(runner)))
    job = {"prompt": [7], "new_tokens": 3, "repeats": 2, "lookaheads": [5], "draft": "folder"}
    runner.write_text(f"""
import sys
sys.path.insert(0, {str(engines.RUNNERS)!r})
import job
def refused(n):
    raise ValueError("no draft")
print('noise')
job.do(lambda work: job.speculating(work, lambda n: lambda prompt, length: prompt * length, refused))
""")
    ways = engines.measure("it", Path(sys.executable), job)
    assert len(ways["prompt lookup, 5"]["speeds"]) == 2 and ways["prompt lookup, 5"]["tokens"] == [7, 7, 7]
    assert ways["draft, 5"] == {"error": "ValueError: no draft"} and len(ways) == 2
    runner.write_text("import no_such_module")
    assert engines.measure("it", Path(sys.executable), job) == {
        "": {"error": "ModuleNotFoundError: No module named 'no_such_module'"}
    }


@pytest.mark.slow
def test_this_environment_is_a_row_of_the_comparison(tmp_path):
    said = run(
        "examples/compare_engines.py", "--engines", "hf_ssd", "--environments", tmp_path, "--max-new-tokens", 12,
        "--repeats", 1, "--lookaheads", 3,
    )  # fmt: skip
    rows = [re.findall(r"\(([\d.]+)\)", row) for row in said.splitlines() if row.endswith("| all |")]
    assert len(rows) == 2 and len(rows[0]) == 3 and len(rows[1]) == 2, said
