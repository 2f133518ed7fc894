"""The evaluation on datasets, run as a user would, and its metrics."""

import csv
import json
import os
import sys
from types import SimpleNamespace

import evaluate
import evaluate_datasets
import pytest
from evaluation import prompts, report, results_file

from .helpers.programs import ROOT, run

PROMPTS = ["def read(path):\n", "import os\n\n", "class Reader:\n    def __init__(self, path):\n"]
METHODS = ["plain", "assisted", "sd", "ssd"]
PROGRAM = "examples/evaluate_datasets.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]


def small(folder):
    """Options of a small run on a JSON-lines file and a CSV file."""
    files = [folder / "lines.jsonl", folder / "table.csv"]
    return ["--dataset", *files, "--prompt-field", "text", "--num-samples", 2, "--max-new-tokens", 12,
            "--lookahead", 3, "--budget", 6, "--output", folder / "out"]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with prompts and, in `out`, what a run on them has written; and what it has printed."""
    folder = tmp_path_factory.mktemp("evaluation")
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in PROMPTS))
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *enumerate(reversed(PROMPTS))])
    return folder, run(PROGRAM, *small(folder))


def test_a_file_of_json_lines_and_one_of_csv(finished):
    folder, output = finished
    header, *runs = map(json.loads, (folder / "out/results.jsonl").read_text().splitlines())
    assert header["arguments"]["max_new_tokens"] == 12 and {"torch", "transformers"} <= set(header["versions"])
    turns = [(name, batch, method) for name in ("lines", "table") for batch in (0, 1) for method in METHODS]
    assert [(run["dataset"], run["batch"], run["method"]) for run in runs] == turns
    for one in runs:
        plain = next(other for other in runs if (other["dataset"], other["batch"]) == (one["dataset"], one["batch"]))
        assert one["text"] == plain["text"] and one["token_ids"] == plain["token_ids"]
        assert 0 < one["tokens"] == len(one["token_ids"][0]) <= 12 and 0 < one["prefill"] < one["seconds"]
        assert (one["acceptance"] is None) == (one["method"] in ("plain", "assisted"))
    table = (folder / "out/results.md").read_text()
    assert table in output
    header, _, *lines = [line.strip("| \n").split(" | ") for line in table.splitlines() if line.startswith("|")]
    assert header[2:8] == [*(f"{m} tokens/s" for m in ("AR", "assisted", "SD", "SSD")), "SSD/SD", "SSD/AR"]
    rows = {line[0]: dict(zip(header, line)) for line in lines}
    assert list(rows) == ["lines", "table", "all"]
    for name, count in (("lines", 2), ("table", 2), ("all", 4)):
        row = rows[name]
        assert row["prompts"] == str(count) and 0 <= float(row["hit rate"]) <= 1 and 0 < float(row["acceptance"]) <= 1
        assert row["identical to AR"] == ", ".join(f"{m} {count}/{count}" for m in ("assisted", "SD", "SSD"))
        ratio = float(row["SSD tokens/s"]) / float(row["AR tokens/s"])
        assert float(row["SSD/AR"]) == pytest.approx(ratio, abs=0.01)
    assert (folder / "out/results.png").stat().st_size > 5000


def test_without_matplotlib_there_is_a_table_without_a_figure(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report.draw([], [], tmp_path / "figure.png")
    assert "No figure was drawn" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_a_file_that_is_not_there_is_said_first(tmp_path):
    said = run(PROGRAM, "--dataset", tmp_path / "none.jsonl", "--target", "no/such/target", status=1)
    assert said.splitlines()[-1] == f"There is no file '{tmp_path / 'none.jsonl'}'." and "Traceback" not in said


@pytest.mark.slow
def test_a_hub_id_without_a_network(tmp_path):
    offline = {**os.environ, "HF_HOME": str(tmp_path)}
    errors = run(PROGRAM, "--dataset", "gsm8k", "--output", tmp_path / "out", status=1, env=offline).strip()
    assert "openai/gsm8k could not be loaded" in errors and "--dataset gsm8k=FILE" in errors
    assert errors.count("\n") == 0 and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_copies_of_named_datasets_on_a_divided_target(tmp_path):
    gsm8k = [{"question": "What is 1 + 1?", "answer": "1 + 1 = 2\n#### 2"}, {"question": "x = ", "answer": "#### 7"}]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in gsm8k))
    # Whatever the models write, these tests pass and fail
    prompt, test = "def f(x):\n    return 1\n\n\nTEXT = '''", "'''\ndef check(f):\n    assert f(0) == "
    rows = [(prompt, f"{test}{number}", "f") for number in (1, 2)]
    with (tmp_path / "programs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "test", "entry_point"], *rows])
    output = run(
        *TORCHRUN, PROGRAM, "--dataset", f"gsm8k={tmp_path / 'gsm8k.jsonl'}",
        f"humaneval={tmp_path / 'programs.csv'}", "--execute-code", "--batch-size", 2, "--max-new-tokens", 12,
        "--lookahead", 3, "--budget", 6, "--output", tmp_path / "out",
    )  # fmt: skip
    assert output.count("| dataset | prompts |") == 1 and "SSD/AR" in output and "SSD/SD" not in output
    assert "| humaneval | pass_at_1 | 0.500 | 0.500 |" in output and "| gsm8k | gsm8k_exact_match |" in output
    assert output.count("SSD 2/2") == 2 and "SSD 4/4" in output
    runs = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()[1:]]
    assert [(run["dataset"], run["method"], run["rows"]) for run in runs] == [
        (name, method, 2) for name in ("gsm8k", "humaneval") for method in ("plain", "ssd")
    ]


# ---------------------------------------------------------------- the parts


def arguments(**changes):
    defaults = {"methods": None, "batch_size": 1, "num_samples": 2, "max_new_tokens": 8, "temperature": 0.0}
    return SimpleNamespace(**{**defaults, "lookahead": None, "budget": None, **changes})


def test_methods_that_cannot_run_are_left_out_or_refused(capsys):
    choose = evaluate_datasets.choose_methods
    assert choose(arguments(), is_launched=False) == METHODS and not capsys.readouterr().out
    assert choose(arguments(methods=["ssd", "plain"]), is_launched=False) == ["plain", "ssd"]
    assert choose(arguments(batch_size=2), is_launched=False) == ["plain", "sd", "ssd"]
    assert "left out" in capsys.readouterr().out
    assert choose(arguments(), is_launched=True) == ["plain", "ssd"]
    with pytest.raises(ValueError, match="Under torchrun .* --methods plain ssd"):
        choose(arguments(methods=["plain", "sd"]), is_launched=True)
    for changes, message in (({"batch_size": 0}, "--batch-size"), ({"lookahead": 99}, "lookahead")):
        with pytest.raises(ValueError, match=message):
            choose(arguments(**changes), is_launched=False)


def test_what_is_no_dataset_is_refused(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "a b"}\n{"text": "c"}\n{"text": ""}\n{"text": "d"}\n')
    samples = prompts.load_samples(str(path), "text", 2, lambda prompt: " " not in prompt)
    assert [sample.prompt for sample in samples] == ["c", "d"]
    for given, field, message in (
        ("humanevil", "text", "none of humaneval, gsm8k"),
        (str(path), "prompt", "no column 'prompt', but text. Choose with --prompt-field"),
        (f"gsm8k={path}", "text", "no column 'question'"),
        (f"gsm8k={tmp_path}/none.csv", "text", "no file"),
    ):
        with pytest.raises(ValueError, match=message):
            prompts.load_samples(given, field, 2, lambda prompt: True)
    with pytest.raises(ValueError, match="lower --max-new-tokens"):
        prompts.load_samples(str(path), "text", 2, lambda prompt: False)
    path.write_text('{"text": "a b"\n')
    with pytest.raises(ValueError, match="cannot be read as jsonl"):
        prompts.load_samples(str(path), "text", 2, lambda prompt: True)


def test_a_named_dataset_has_its_own_prompt_and_reference(tmp_path):
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps([{"instruction": "Add.", "input": "1 2"}, {"instruction": "Rest.", "input": ""}]))
    samples = prompts.load_samples(f"alpaca={path}", "prompt", 5, lambda prompt: True)
    assert [(s.prompt, s.reference) for s in samples] == [("Add.\n\n1 2", None), ("Rest.", None)]


def run_of(method, batch, tokens, seconds, token_ids, **rounds):
    return {"dataset": "a", "batch": batch, "method": method, "rows": 1, "tokens": tokens, "prefill": 1.0,
            "seconds": seconds, "token_ids": token_ids, "rounds": rounds or None}  # fmt: skip


def test_figures_by_hand():
    runs = [run_of("plain", 0, 11, 6.0, [[1]]), run_of("plain", 1, 1, 2.0, [[2]])]  # 10 tokens in 5 + 1 seconds
    runs += [
        run_of("ssd", 1, 21, 4.0, [[3]], lookahead=[2], accepted=[[2]], sources=[["prepared"]]),
        run_of("ssd", 0, 11, 4.0, [[1]], lookahead=[2], accepted=[[1]], sources=[["primary"]]),
    ]  # 30 tokens in 3 + 3 seconds; 3 of 4 tokens accepted that were put to the test
    (row,) = report.rows_of(runs, ["a"], ["plain", "ssd"])
    assert row["speed"] == pytest.approx({"plain": 10 / 6, "ssd": 5.0}) and row["prompts"] == 2
    assert (row["hit rate"], row["acceptance"], row["identical"]) == (0.5, 0.75, {"ssd": (1, 2)})
    text = report.markdown([row], ["plain", "ssd"], False, {"a": ("exact", {"plain": 0.5, "ssd": 0.25})})
    assert "| a | 2 | 1.7 | 5.0 | 3.00 | 0.50 | 0.75 | SSD 1/2 |" in text and "| a | exact | 0.500 | 0.250 |" in text
    assert "identical" not in report.markdown([row], ["plain", "ssd"], True, {})


def test_a_file_of_results_drops_what_was_not_written_to_its_end(tmp_path):
    path = tmp_path / "out" / "results.jsonl"
    run = {"dataset": "a", "batch": 0, "method": "sd"}
    results = results_file.ResultsFile(path, {"n": 1}, {"versions": {}})
    assert not path.exists()
    results.add(run)
    results.add({**run, "batch": 1})
    path.write_bytes(path.read_bytes()[:-1])
    again = results_file.ResultsFile(path, {"n": 1}, {})
    assert again.runs == [run] and again.has("a", 0, "sd") and not again.has("a", 1, "sd")
    again.add({**run, "batch": 1})
    assert len(path.read_text().splitlines()) == 3
    with pytest.raises(ValueError, match=r"other arguments \(n was 1 and is 2\)"):
        results_file.ResultsFile(path, {"n": 2}, {})
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="not a file of results"):
        results_file.ResultsFile(path, {"n": 1}, {})


# ---------------------------------------------------------------- the metrics


@pytest.mark.parametrize(
    "prediction, solution, same",
    [
        ("She has 3 + 4 = 7 apples.", "7", 1),
        ("3 + 4 is **7.00**!", "7", 1),
        ("It costs $1,234.50.", "1234.5", 1),
        ("10 - 14 = -4", "-4", 1),
        ("the range 8-3", "3", 1),
        ("7 apples for 2 people", "7", 0),
        ("no idea", "7", 0),
        ("", "7", 0),
        ("#### 70000", "70,000", 1),
    ],
)
def test_gsm8k_exact_match(prediction, solution, same):
    module = evaluate.load(str(ROOT / "examples/metrics/gsm8k_exact_match"), keep_in_memory=True)
    references = [f"1 + 2 = <<1+2=3>>3\n#### {solution}"]
    assert module.compute(predictions=[prediction], references=references) == {"exact_match": same}
    predictions, references = [prediction, "0"], [*references, "#### 1"]
    assert module.compute(predictions=predictions, references=references) == {"exact_match": same / 2}


@pytest.mark.slow
def test_pass_at_1():
    module = evaluate.load(str(ROOT / "examples/metrics/pass_at_1"), keep_in_memory=True)
    reference = {
        "prompt": 'def add(a, b):\n    """Adds."""\n',
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
        "entry_point": "add",
    }
    completions = {
        "    return a + b\n": True,
        "    return a + b\n\nprint(add(1, 2)\ndef": True,  # what follows the function does not count
        "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.": True,
        "import operator\n\ndef add(a, b):\n    return operator.add(a, b)\n": True,
        "    return a - b\n": False,
        "    return a +\n": False,
        "": False,
        "    while True:\n        pass\n": False,
        "    data = bytearray(1 << 29)\n    return a + b\n": False,
        "    raise SystemExit\n": False,
        "    import os\n    os._exit(0)\n": False,
        "    import os\n    assert 'HOME' not in os.environ\n    return a + b\n": True,
    }
    options = {"execute_code": True, "time_limit": 2.0, "memory_limit": 1 << 28, "num_workers": 2}
    for passes in (True, False):
        of_kind = [completion for completion, is_right in completions.items() if is_right == passes]
        result = module.compute(predictions=of_kind, references=[reference] * len(of_kind), **options)
        assert result == {"pass_at_1": float(passes)}
    with pytest.raises(ValueError, match="execute_code=True"):
        module.compute(predictions=["    return a + b\n"], references=[reference])
