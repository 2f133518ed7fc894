"""The README's first table: its rows, and the program as a user runs it."""

import json
import sys

import pytest

from .test_pair import PAIR, ROOT, run

sys.path.insert(0, str(ROOT / "examples"))

import measure_public  # noqa: E402


def test_the_table_has_a_row_for_each_method_and_empty_cells_for_what_did_not_run():
    def row(ratio, **more):
        return {"over plain": ratio, "lowest": ratio - 0.1, "highest": ratio + 0.25, **more}

    ours = {measure_public.IN_TURN: row(1.5), measure_public.SSD: row(2.0, **{"hit rate": 0.75})}
    columns = {
        "chat, greedy": {measure_public.PLAIN: row(1.0), measure_public.LOOKUP: row(1.25), **ours},
        "chat, T = 0.7": {measure_public.PLAIN: row(1.0), **ours},
    }
    assert measure_public.table(columns).split("\n") == [
        "| speed over plain `generate()` | chat, greedy | chat, T = 0.7 |",
        "| --- | --- | --- |",
        "| transformers' prompt lookup | 1.25 (1.15-1.50) |  |",
        "| hf_ssd, one device | 1.50 (1.40-1.75) | 1.50 (1.40-1.75) |",
        "| hf_ssd, two devices | 2.00 (1.90-2.25) | 2.00 (1.90-2.25) |",
        "| hit rate | 0.75 | 0.75 |",
    ]


@pytest.mark.slow
def test_measure_public_measures_every_method_on_another_pair(tmp_path):
    output = run(
        "examples/measure_public.py", tmp_path, PAIR / "draft", "--target", PAIR / "target",
        "--kinds", "chat", "--temperatures", 0, "--repeats", 1, "--max-new-tokens", 24, "--assistant-tokens", 2, 3,
        "--output", tmp_path / "figures.json",
    )  # fmt: skip
    names = [measure_public.LOOKUP, measure_public.NGRAM, measure_public.IN_TURN, measure_public.SSD]
    names += [measure_public.ALL_CORES]
    assert all(f"\n| {name} | " in output for name in ["transformers' assisted generation", *names])
    assert "plain generate() on" in output and "Load before:" in output
    rows = json.loads((tmp_path / "figures.json").read_text())["columns"]["chat, greedy"]
    assert all(row["same tokens"] for row in rows.values())
    # How often a plan that follows the clock speculates ahead in 24 tokens is not asserted, only that it is counted.
    assert "hit rate" in rows[measure_public.SSD]
