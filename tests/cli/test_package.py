"""The package, built and installed as users do it, outside the clone."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from hf_ssd.cli.main import SCRIPTS

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "_build")


def run(*command, cwd, codes=(0,)):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, env=environment)
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder with the programs of an environment in which the wheel of the source distribution is installed."""
    place = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT, place / "source", ignore=LEFT_OUT)
    build = "from setuptools import build_meta; build_meta.build_sdist('../built')"
    run(sys.executable, "-c", build, cwd=place / "source")
    pip, offline = [sys.executable, "-m", "pip"], ["--no-deps", "--no-index", "--quiet"]
    (source,) = (place / "built").glob("*.tar.gz")
    run(*pip, "wheel", "--no-build-isolation", *offline, "-w", str(place / "built"), str(source), cwd=place)
    run(sys.executable, "-m", "venv", "--without-pip", str(place / "environment"), cwd=place)
    # What hf_ssd needs comes from the environment of the tests: a folder in a .pth file hides nothing of the new one.
    paths = {"base": str(place / "environment"), "platbase": str(place / "environment")}
    (Path(sysconfig.get_path("purelib", vars=paths)) / "others.pth").write_text(sysconfig.get_path("purelib"))
    python = Path(sysconfig.get_path("scripts", vars=paths)) / "python"
    (wheel,) = (place / "built").glob("*.whl")
    run(*pip, "--python", str(python), "install", *offline, str(wheel), cwd=place)
    return python.parent


@pytest.mark.slow
def test_the_doctor_knows_the_embedded_pair(installed, tmp_path):
    command = [str(installed / "hf-ssd"), "check", "--json", "--repeats", "3", "--max-new-tokens", "48"]
    found = json.loads(run(*command, cwd=tmp_path, codes=(0, 1)))
    assert Path(found["draft"]["name"]).is_relative_to(installed.parent) and found["failure"] is None
    assert found["verdict"].startswith("yes: " if found["pays"] else "no: ") and found["plan"]
    assert found["target"]["family"] == "llama" and found["target"]["vocabulary"] == found["draft"]["vocabulary"]
    assert 0.3 < found["acceptance"] <= 1
    assert found["assistant_tokens"] in ((None,) if found["skipped"] else (3, 5))  # left out on a busy machine
    assert min(found[name] for name in ("verify_seconds", "predicted", "speed", "plain")) > 0


@pytest.mark.slow
def test_every_package_of_the_clone_is_installed(installed, tmp_path):
    program = "import hf_ssd; print(hf_ssd.__path__[0])"
    place = Path(run(str(installed / "python"), "-c", program, cwd=tmp_path).strip())
    assert place.is_relative_to(installed.parent)
    ours, theirs = (
        {path.relative_to(folder) for path in folder.rglob("*.*") if path.suffix in (".py", ".html", ".typed")}
        for folder in (ROOT / "hf_ssd", place)
    )
    scripts = {path for path in theirs if path.parts[0] == "scripts"}
    assert ours == theirs - scripts and {path.suffix for path in ours} == {".py", ".html", ".typed"}
    assert {Path("scripts", file) for file, _ in SCRIPTS.values()} < scripts


@pytest.mark.parametrize("command", SCRIPTS)
@pytest.mark.slow
def test_scripts_are_commands(command, installed, tmp_path):
    """Each runs from the installed package, with what it imports."""
    helped = run(str(installed / "hf-ssd"), command, "--help", cwd=tmp_path)
    assert helped.startswith(f"usage: hf-ssd {command} ") and SCRIPTS[command][1].split(",")[0][:30] in helped
    run(str(installed / "hf-ssd"), command, "--nothing", cwd=tmp_path, codes=(2,))


@pytest.mark.slow
def test_an_installed_evaluation_finds_the_small_pair(installed, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "import os\\n"}\n' * 2)
    words = "--dataset prompts.jsonl --max-new-tokens 8 --num-samples 2 --methods plain ssd".split()
    run(str(installed / "hf-ssd"), "evaluate", *words, cwd=tmp_path)


def test_the_readme_is_rendered_as_the_description_of_a_package():
    markdown = pytest.importorskip("readme_renderer.markdown")
    rendered = markdown.render((ROOT / "README.md").read_text())  # `None` where a package index would show plain text
    assert rendered is not None and "<table>" in rendered and "<pre" in rendered
