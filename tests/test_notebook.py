"""The notebook runs, says what it promises, and is kept without its outputs."""

import os
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "hf_ssd.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parent.parent), prepend=os.pathsep)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "the same tokens: True" in printed and "hit rate" in printed
    assert re.search(r"SSD was ([\d.]+ times as fast as plain|unsteady: this machine is busy)\n", printed)
    accepted = re.findall(r"draft: [\d.]+ tokens a round, ([\d.]+) accepted", printed)
    assert len(accepted) == 2 and all(float(rate) > 0.5 for rate in accepted)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1


@pytest.mark.slow
def test_measuring_ends_by_the_clock(capsys):
    code = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    names = {}
    for source in code[:3]:
        exec(source.replace("began > 30:", "began > 0:"), names)
    assert len(names["ratios"]) == 1 and "SSD was unsteady" in capsys.readouterr().out


def test_the_notebook_is_kept_without_outputs():
    code = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert len(code) > 5 and not any(cell.outputs or cell.execution_count for cell in code)
