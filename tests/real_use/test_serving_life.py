"""How the program starts, and how the server starts, is named, and ends."""

import pickle
import subprocess
import sys

import pytest

import hf_ssd

LIGHT = """
import sys
from hf_ssd.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert "torch" not in sys.modules and "transformers" not in sys.modules, "what takes seconds was imported"
    raise
raise AssertionError("the command was run")
"""


def python(program: str, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=120)


# ---------------------------------------------------------------- start-up


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["serve", "--help"], ["check", "--help"], ["chat", "--help"], ["bench", "--help"], []],
    ids=" ".join,
)
def test_help_and_version_import_neither_torch_nor_transformers(words, fresh_python):
    done = python(LIGHT, *words)
    assert done.returncode == (0 if words else 2), done.stderr
    assert "hf-ssd" in (done.stdout or done.stderr)


def test_a_config_is_made_and_pickled_without_torch_and_transformers(fresh_python):
    program = """
import pickle, sys
import hf_ssd
assert {*hf_ssd.__all__, "distributed", "theory", "__version__"} <= {*dir(hf_ssd)}
assert pickle.loads(pickle.dumps(hf_ssd.SSDConfig(lookahead=3))) == hf_ssd.SSDConfig(lookahead=3)
assert "torch" not in sys.modules and "transformers" not in sys.modules, "what takes seconds was imported"
"""
    done = python(program)
    assert done.returncode == 0, done.stderr


def test_public_names_are_what_their_modules_have():
    names = {}
    exec("from hf_ssd import *", names)
    for name in hf_ssd.__all__:
        found = getattr(hf_ssd, name)
        assert names[name] is found and found.__name__ == name
        assert pickle.loads(pickle.dumps(found)) is found
    assert hf_ssd.distributed.init_roles and hf_ssd.theory.predict
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = hf_ssd.nothing
    with pytest.raises(ImportError, match="nothing"):
        exec("from hf_ssd import nothing")
