"""What the documents say is true: their Python runs, their commands exist, and their links lead somewhere."""

import argparse
import inspect
import operator
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_ssd
from hf_ssd.cli.main import SCRIPTS, build_parser
from hf_ssd.cli.prompts import prompts_from

from .helpers.programs import PAIR, ROOT, run

DOCUMENTS = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "custom_generate/README.md", "examples/pair/README.md")
]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))


def blocks_of(document: Path, language: str) -> list[str]:
    """Returns the code blocks in a language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)


# ---------------------------------------------------------------- Python

WRITTEN = [document for document in DOCUMENTS if blocks_of(document, "python")]


def on_this_machine(block: str) -> str:
    """Where a block names GPUs, this machine's devices take their place."""
    return block if torch.cuda.device_count() > 1 else re.sub(r"cuda:\d", "cpu", block)


def pair():
    target, draft = (AutoModelForCausalLM.from_pretrained(PAIR / name, dtype="float32") for name in ("target", "draft"))
    return {"target": hf_ssd.enable(target), "draft": draft}


@pytest.fixture
def what_readers_have(tmp_path):
    """The reader's own models and prompt. Everything else a document imports itself."""
    inputs = AutoTokenizer.from_pretrained(PAIR / "target")(
        "import os", return_tensors="pt", return_token_type_ids=False
    )
    target = tmp_path / "target"  # a reader's model has a chat template
    shutil.copytree(PAIR / "target", target)
    (target / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    names = {"TARGET": str(target), "DRAFT": str(PAIR / "draft"), "FOLDER": str(tmp_path)}
    names |= {"PARALLEL_DRAFT": str(PAIR / "parallel_draft"), "REPOSITORY": str(ROOT / "custom_generate")}
    return {**names, **pair(), "inputs": inputs}


SLOW = ("settings.md", "generate.md", "quickstart.md")  # models of the first are compiled
PARAMETERS = [pytest.param(one, marks=[pytest.mark.slow] * (one.name in SLOW)) for one in WRITTEN]


@pytest.mark.parametrize("document", PARAMETERS, ids=lambda path: path.name)
def test_the_python_of_a_document_runs(document, what_readers_have, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for block in blocks_of(document, "python"):
        if "init_roles" not in block and "BitsAndBytesConfig" not in block:  # see tests/conformance/test_quantized.py
            # What follows is not about compiled models any more.
            names = {**what_readers_have, **pair()} if ".compile(" in block else what_readers_have
            exec(compile(on_this_machine(block), document.name, "exec"), names)


@pytest.mark.slow
def test_the_programs_for_torchrun_run(tmp_path):
    programs = [block for block in blocks_of(ROOT / "docs" / "distributed.md", "python") if "init_roles" in block]
    for block in programs:
        program = tmp_path / "program.py"
        program.write_text(f"TARGET, DRAFT = {str(PAIR / 'target')!r}, {str(PAIR / 'draft')!r}\n{block}")
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, program]
        assert "tensor" in run(*words, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert programs


# ---------------------------------------------------------------- the API reference


def entries() -> set[str]:
    """Returns what the reference has entries for; the site's build fails where there is no such name."""
    return set(re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))


def test_the_api_reference_has_an_entry_for_every_public_name():
    names = [*hf_ssd.__all__, *(f"distributed.{name}" for name in hf_ssd.distributed.__all__), "theory"]
    assert entries() == {f"hf_ssd.{name}" for name in names}


@pytest.mark.parametrize("name", sorted(entries()))
def test_every_entry_of_the_api_reference_has_a_docstring_of_its_own(name):
    value = operator.attrgetter(name.removeprefix("hf_ssd."))(hf_ssd)
    own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    # A dataclass without a docstring gets its signature as one.
    assert own and len(own.split()) > 5 and not own.startswith(f"{name.split('.')[-1]}(")


def test_docstrings_become_what_mkdocstrings_reads():
    griffe = pytest.importorskip("griffe", reason="needs the extra docs")
    crossrefs = runpy.run_path(str(ROOT / "docs" / "crossrefs.py"))
    docstring = griffe.Docstring(
        "See [`~hf_ssd.SSDStats`], [`SSDConfig.to_dict`], [`Sequences`] and [this](that).\n\n"
        "Args:\n    draft (`str` or [`~hf_ssd.DraftAssistant`], *optional*, defaults to `None`): A [`Roles`].\n\n"
        "Raises:\n    `ValueError`, [`DraftError`]: It `fails`: always."
    )
    crossrefs["TransformersDocstrings"]().on_object(obj=griffe.Function("f", docstring=docstring))
    assert docstring.value == (
        "See [`SSDStats`][hf_ssd.SSDStats], [`SSDConfig.to_dict`][hf_ssd.SSDConfig.to_dict], `Sequences` and "
        "[this](that).\n\n"
        "Args:\n    draft (str or hf_ssd.DraftAssistant): A [`Roles`][hf_ssd.distributed.Roles].\n\n"
        "Raises:\n    ValueError, DraftError: It `fails`: always."
    )


# ---------------------------------------------------------------- commands


class _Parsed(Exception):
    """The arguments of a command are such as it takes."""


def commands_of(document: Path) -> list[str]:
    """Returns what the document tells its reader to run of this repository's programs, one command each."""
    text = document.read_text()
    lines = [line for block in blocks_of(document, "bash") for line in block.replace("\\\n", " ").splitlines()]
    # Inline commands: a line break within one is a blank.
    lines += [" ".join(code.split()) for code in re.findall(r"`((?:python|torchrun|accelerate|hf-ssd) [^`]+)`", text)]
    parts = [part.split("#")[0].strip() for line in lines for part in line.split("&&")]
    return [part for part in parts if "examples/" in part or part.startswith("hf-ssd ")]


COMMANDS = [(document, command) for document in DOCUMENTS for command in commands_of(document)]


@pytest.mark.parametrize("document, command", COMMANDS, ids=[f"{path.name}: {command}" for path, command in COMMANDS])
def test_a_command_of_a_document_is_one_that_its_program_takes(document, command, monkeypatch):
    words = [word for word in shlex.split(command) if word != "..."]
    if words[0] == "hf-ssd" and words[1] in SCRIPTS:  # a script's own parser reads its words
        words = ["python", f"examples/{SCRIPTS[words[1]][0]}", *words[2:]]
    if words[0] == "hf-ssd":
        build_parser().parse_args(words[1:])
        return
    place = next(i for i, word in enumerate(words) if word.endswith(".py"))
    program = ROOT / words[place]
    assert program.exists()
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self, arguments=None, namespace=None):
        parse(self, arguments, namespace)
        raise _Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", [str(program), *_with_values(words[place + 1 :])])
    monkeypatch.setattr(sys, "path", [str(program.parent), *sys.path])
    with pytest.raises(_Parsed):
        runpy.run_path(str(program), run_name="__main__")


def _with_values(words: list[str]) -> list[str]:
    """Options whose value the document leaves open (`--target ...`) get one."""
    is_open = [
        word in ("--target", "--draft") and after.startswith("--") for word, after in zip(words, [*words[1:], "--"])
    ]
    return [part for word, lacks in zip(words, is_open) for part in ([word, "somewhere"] if lacks else [word])]


# ---------------------------------------------------------------- links


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        goal = (document.parent / path).resolve() if path else document
        assert goal.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", goal.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, link


def references(site: Path) -> list[tuple[str, Path]]:
    """Returns each file of this site that a page links to or shows, as it is written and where it is."""
    found = []
    for page in site.rglob("index.html"):
        for link in re.findall(r'(?:href|src)="?([^"\s>]+)', page.read_text()):
            if not re.match(r"\w+:|#", link):
                found.append((link, page.parent / urllib.parse.urlsplit(link).path))
    return found


@pytest.mark.slow
def test_the_site_is_built_and_whole(tmp_path):
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    run("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site", env=environment)
    found = references(tmp_path / "site")
    assert any(path.suffix == ".css" for _, path in found) and len({path for _, path in found}) > 30
    assert [link for link, path in found if not path.exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_tests_that_a_document_names_exist(document):
    known = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", document.read_text()):
        assert f"def {name}(" in known, name


def test_the_readme_says_what_its_figures_are_of_which_paper_it_is_about_and_what_versions_it_needs():
    text, cited = (ROOT / "README.md").read_text(), (ROOT / "CITATION.cff").read_text()
    (number,) = set(re.findall(r"arXiv:(\d{4}\.\d{5})", cited))
    assert f"https://arxiv.org/abs/{number}" in text
    assert f"arXiv:{number}" in "".join(blocks_of(ROOT / "README.md", "bibtex"))
    paragraph = next(part for part in text.split("\n\n") if part.startswith("Qwen2.5-Coder-1.5B-Instruct with"))
    assert "measure_public.py" in paragraph and "two cores" in paragraph and "of a GPU yet" in text
    setup = (ROOT / "setup.cfg").read_text()
    versions = {"Python": "python_requires = >=(.*)", "torch": "torch>=([0-9.]*)", "transformers": "ers>=([0-9.]*)"}
    for name, asked in versions.items():
        assert f"{name} >= {re.search(asked, setup)[1]}" in text


def test_the_first_program_of_the_readme_prints_text_within_ten_lines(monkeypatch, capsys):
    program = blocks_of(ROOT / "README.md", "python")[0]
    assert len(program.split("\n")) <= 11 and "examples/pair/draft" in program
    monkeypatch.chdir(ROOT)
    exec(program, {})
    said = capsys.readouterr().out
    assert said.startswith("class Config:\n    def __init__(self, name):") and len(said) > 100


def test_the_check_of_the_project_runs_the_second_command_of_the_readme_as_it_stands_there():
    setup = blocks_of(ROOT / "README.md", "bash")[0]
    quickstart, tests = setup.strip().split("\n")
    assert quickstart == "pip install -c constraints.txt -e . && python examples/quickstart.py"
    # After "&&" bash does not end for a command that failed before it, so the line says so itself.
    assert f"{tests} || exit" in (ROOT / ".ci" / "quick").read_text().split("\n")
    assert ".ci/quick" in (ROOT / ".ci" / "run").read_text().split("\n")


def test_the_prompts_that_the_readme_makes_are_those_that_its_check_reads(tmp_path):
    start = next(block for block in blocks_of(ROOT / "README.md", "bash") if "prompts.jsonl" in block)
    made, check = start.split("\n")[:2]
    subprocess.run(["bash", "-c", made], cwd=tmp_path, check=True, timeout=20)
    args = build_parser().parse_args(check.split()[1:])
    assert len(prompts_from(tmp_path / args.prompts, args.prompt_field)) == 2
    assert all((ROOT / name / "config.json").exists() for name in (args.target, args.draft))


# ---------------------------------------------------------------- what is wrong would be noticed


def test_a_wrong_block_link_test_and_option_are_found(tmp_path, what_readers_have, monkeypatch, capsys):
    document = tmp_path / "wrong.md"
    block = "```python\ntarget.generate(**inputs, lookahaed=3)\n```\n"
    document.write_text(block + "See [this](nowhere.md), `test_of_nothing`.\n")
    with pytest.raises(ValueError, match="lookahaed"):
        test_the_python_of_a_document_runs(document, what_readers_have, monkeypatch, capsys)
    with pytest.raises(AssertionError):
        test_links_lead_somewhere(document)
    with pytest.raises(AssertionError):
        test_the_tests_that_a_document_names_exist(document)
    assert len(COMMANDS) > 15
    for command in ("python examples/quickstart.py --lookahaed 3", "hf-ssd check TARGET DRAFT --lookahaed 3"):
        with pytest.raises(SystemExit):
            test_a_command_of_a_document_is_one_that_its_program_takes(None, command, monkeypatch)
