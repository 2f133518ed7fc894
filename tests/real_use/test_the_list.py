"""The list of what people met, in the package's docstring."""

import re
from pathlib import Path

import tests.real_use

TESTS = Path(__file__).parents[1]
HERE = Path(__file__).parent


def listed(text: str) -> list[tuple[Path, str]]:
    found = re.findall(r"(?:^|\s)(\S+\.py)::(\w+)$", text, re.MULTILINE)
    return [((TESTS if "/" in name else HERE) / name, test) for name, test in found]


def missing(text: str) -> list[str]:
    return [test for path, test in listed(text) if not re.search(rf"^def {test}\(", path.read_text(), re.MULTILINE)]


def test_each_symptom_has_a_test_and_each_file_a_symptom():
    text = tests.real_use.__doc__
    symptoms = [line for line in text.split("\n") if line.startswith("    ")]
    assert len(listed(text)) == len(symptoms) > 50 and not missing(text)
    assert {path for path, _ in listed(text) if path.parent == HERE} == {*HERE.glob("test_*.py")} - {Path(__file__)}


def test_a_test_that_is_gone_is_noticed():
    assert missing("    a symptom  test_the_list.py::test_that_is_gone\n") == ["test_that_is_gone"]
