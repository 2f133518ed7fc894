"""The text that the embedded pair learns: Python of one style, from the standard library and installed packages.

A model of a few million parameters learns best what is regular. So comments, annotations, tables of data, long
functions and all but the first paragraph of a docstring are left out, and `ruff format` writes what remains.
"""

import ast
import inspect
import re
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

from tqdm.auto import tqdm

# Python packages with permissive licences; a module's own subfolders that are left out are in LEFT_OUT.
PACKAGES = """
accelerate aiohttp anyio attrs charset-normalizer click datasets dill evaluate execnet filelock fonttools fsspec h11
huggingface_hub Jinja2 markdown-it-py matplotlib networkx numpy packaging pandas pillow pluggy psutil pydantic
Pygments pyparsing pytest pytest-xdist python-dateutil PyYAML requests rich setuptools sortedcontainers typer urllib3
yarl
""".split()
STANDARD_LIBRARY = "standard library"
LEFT_OUT = set(
    "test tests testing idle_test conftest.py site-packages dist-packages _vendor _distutils lib2to3 idlelib "
    "turtledemo encodings pydoc_data __pycache__ v1 lexers styles benchmarks baseline otData.py".split()
)
LONGEST_FUNCTION = 40  # lines
LONGEST_TABLE = 12  # elements
LONGEST_STRING = 200  # characters
HELD_OUT_EVERY = 40  # files


class Cleaner(ast.NodeTransformer):
    """Leaves out of a module what a small model cannot learn from."""

    def _body(self, node):
        self.generic_visit(node)
        node.body = [*self._docstring(node), *node.body[ast.get_docstring(node) is not None :]]
        if not node.body and not isinstance(node, ast.Module):
            node.body = [ast.Pass()]
        return node

    @staticmethod
    def _docstring(node) -> list[ast.Expr]:
        """Returns the first paragraph of a docstring as a statement, if it is prose of up to three lines."""
        first = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")[0]
        prose = re.match(r"[A-Z][\w ]", first) and len(first.splitlines()) <= 3 and first.isascii()
        return [ast.Expr(ast.Constant(first))] if prose and not re.search(r">>>|::|\\|\"\"\"", first) else []

    visit_Module = visit_ClassDef = _body

    def visit_FunctionDef(self, node):
        names = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
        if node.end_lineno - node.body[0].end_lineno > LONGEST_FUNCTION or "overload" in names:
            return None
        node.returns = None
        return self._body(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_arg(self, node):
        node.annotation = None
        return node

    def visit_AnnAssign(self, node):
        if not node.value or not isinstance(node.target, ast.Attribute):
            return self._short(node)
        return self._short(ast.Assign([node.target], node.value, lineno=node.lineno))

    def _short(self, node):
        """Leaves out statements with tables of data or long strings."""
        for part in ast.walk(node):
            elements = getattr(part, "elts", None) or getattr(part, "keys", None) or ()
            text = getattr(part, "value", None)
            if len(elements) > LONGEST_TABLE or isinstance(text, (str, bytes)) and len(text) > LONGEST_STRING:
                return None
        return node

    visit_Assign = visit_AugAssign = visit_Expr = visit_Return = _short

    def visit_ImportFrom(self, node):
        return None if node.level or node.module == "__future__" or len(node.names) > 4 else node

    def visit_If(self, node):
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return None
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def generic_visit(self, node):
        super().generic_visit(node)
        if getattr(node, "body", None) == [] and not isinstance(node, ast.Module):
            node.body = [ast.Pass()]
        if isinstance(node, ast.Try) and not node.handlers and not node.finalbody:
            return None
        return node


def clean(source: str) -> str:
    """Returns what remains of a module, empty if nothing does or it is no Python of this version."""
    try:
        return ast.unparse(ast.fix_missing_locations(Cleaner().visit(ast.parse(source))))
    except (SyntaxError, ValueError, RecursionError):
        return ""


def formatted(texts: list[str]) -> list[str]:
    """Returns texts as `ruff format` writes them."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{i}.py" for i in range(len(texts))]
        for path, text in zip(paths, texts):
            path.write_text(text)
        command = [sys.executable, "-m", "ruff", "format", "--isolated", "--quiet", "--line-length", "100", folder]
        subprocess.run(command, check=False)  # it exits with 2 if it cannot read one of the files
        return [path.read_text() for path in paths]


def files_of(source: str) -> list[Path]:
    """Returns the files of a package, or of the standard library, in a fixed order."""
    if source == STANDARD_LIBRARY:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [path.relative_to(root) for path in root.rglob("*.py")]
    else:
        root = Path(metadata.distribution(source).locate_file(""))
        files = [Path(path) for path in metadata.files(source) if path.suffix == ".py"]
    files = [path for path in sorted(files) if not LEFT_OUT & set(path.parts) and not path.name.startswith("test_")]
    return [root / path for path in files if (root / path).stat().st_size > 500]


def read_corpus(max_files: int | None = None) -> tuple[list[str], list[str]]:
    """Returns the texts to learn from and the texts held out, every 40th file of each source."""
    cleaned = [
        (i, clean(path.read_text(encoding="utf-8", errors="ignore")))
        for source in tqdm([STANDARD_LIBRARY, *PACKAGES], "reading", unit="package")
        for i, path in enumerate(files_of(source)[:max_files])
    ]
    texts, held_out = [], []
    for (i, _), text in zip(cleaned, formatted([text for _, text in cleaned])):
        if len(text) > 300 and text.isascii():
            (texts if i % HELD_OUT_EVERY else held_out).append(text)
    return texts, held_out


def licence(name: str) -> str:
    """Returns the licence that a package declares, from the first field that says it in one line."""
    of = metadata.metadata(name)
    classifiers = [text.split(" :: ")[-1] for text in of.get_all("Classifier", []) if text.startswith("License")]
    stated = [of.get("License-Expression"), *classifiers, of.get("License")]
    return next(text.splitlines()[0] for text in stated if text)
