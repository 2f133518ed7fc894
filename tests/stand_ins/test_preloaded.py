"""A program that is forked from a server is told, and tells, what a fresh one would be and would."""

import os
import subprocess
import sys

import pytest

from ..helpers import preloaded

PROGRAM = """
import os, sys
print(sys.argv[1:], sys.stdin.read(), os.getcwd(), os.environ["SOME"], __name__, os.read(int(sys.argv[2]), 9))
print(sys.path[0] in ("", os.path.dirname(sys.argv[0])), os.getpid() == os.getsid(0))
print("a word", file=sys.stderr)
sys.exit({status})
"""


def run(how, status, folder):
    """Returns what there is to see of a program."""
    program = PROGRAM.format(status=status)
    (folder / "program.py").write_text(program)
    what = ["-c", program] if how == "-c" else ["-m", "program"] if how == "-m" else ["program.py"]
    reading, writing = os.pipe()
    os.write(writing, b"inherited")
    os.close(writing)
    done = subprocess.run(
        [sys.executable, *what, "one", str(reading)], input="typed", capture_output=True, text=True, cwd=folder,
        env={**os.environ, "SOME": "thing"}, pass_fds=[reading], start_new_session=True,
    )  # fmt: skip
    os.close(reading)
    return done.returncode, done.stdout.replace(f"'{reading}'", "its number"), done.stderr


@pytest.mark.parametrize("how, status", [("script", "0"), ("-c", "3"), ("-m", "'why'")])
def test_a_preloaded_program_is_like_a_fresh_one(how, status, tmp_path, monkeypatch):
    seen = run(how, status, tmp_path)
    monkeypatch.setattr(subprocess, "Popen", preloaded.FRESH)
    assert seen == run(how, status, tmp_path) and "typed" in seen[1] and "inherited" in seen[1]


def test_a_folder_that_torch_names_when_it_compiles_is_no_reason_for_a_fresh_one(tmp_path, monkeypatch):
    """All workers of a suite would be fresh ones as soon as one test has looked whether torch can compile."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", ""])
    assert process.wait(20) == 0 and (subprocess.Popen is preloaded.FRESH or process.connection is not None)
