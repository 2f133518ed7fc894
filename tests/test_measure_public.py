"""The README's first table: its rows, and the program as a user runs it."""

import json

import measure_public
import pytest

from .helpers.programs import PAIR, run


def test_the_table_has_a_row_for_each_method_and_empty_cells_for_what_did_not_run():
    def row(ratio):
        return {"over plain": ratio}

    columns = {
        "code, greedy": {
            measure_public.PLAIN: row(1.0),
            measure_public.LOOKUP: row(1.25),
            measure_public.IN_TURN: row(2),
        },
        "batch of 4, greedy": {measure_public.PLAIN: row(1.0), measure_public.IN_TURN: row(1.5)},
    }
    assert measure_public.table(columns).split("\n") == [
        "| speed over plain `generate()` | code, greedy | batch of 4, greedy |",
        "| --- | --- | --- |",
        "| transformers' prompt lookup | 1.25 |  |",
        "| hf_ssd in turn | 2.00 | 1.50 |",
    ]


@pytest.mark.slow
def test_measure_public_measures_every_method_on_another_pair(tmp_path):
    output = run(
        "examples/measure_public.py", PAIR / "target", PAIR / "draft", "--kinds", "code", "edit", "--temperatures", 0,
        "--repeats", 1, "--max-new-tokens", 24, "--assistant-tokens", 2, 3, "--output", tmp_path / "figures.json",
    )  # fmt: skip
    ours = [measure_public.IN_TURN, measure_public.AHEAD, measure_public.DEFAULT]
    names = [measure_public.BEST, measure_public.LOOKUP, *ours]
    assert all(f"\n| {name} | " in output for name in names)
    assert "plain generate():" in output and "Load before:" in output
    columns = json.loads((tmp_path / "figures.json").read_text())["columns"]
    assert list(columns) == ["code, greedy", "edit, greedy", "batch of 2, greedy"]
    assert all(row["same tokens"] for rows in columns.values() for row in rows.values())
    assert columns["batch of 2, greedy"].keys() == {"plain generate", *ours}
    assert all(rows[measure_public.AHEAD]["hit rate"] > 0 for rows in columns.values())
