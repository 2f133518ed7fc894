"""Build the API reference, one Markdown page, from the signatures and docstrings of the public names.

    python docs/make_api.py                       # writes docs/_build/api.md
    python docs/make_api.py --output folder

What is public is what `hf_ssd` and `hf_ssd.distributed` list in `__all__`, and the functions of `hf_ssd.theory`.
"""

import argparse
import dataclasses
import functools
import inspect
import re
import textwrap
from pathlib import Path

import hf_ssd
from hf_ssd import distributed, theory

WIDTH = 120
HEAD = """# API reference

Built from the docstrings by `python docs/make_api.py`. `docs/user_guide.md` says what the settings are good for, and
how to read the figures."""
INDENTED = ("Args", "Attributes", "Raises")  # sections of a docstring whose entries become a list
GIVEN = ("DraftAssistant", "DraftError", "Roles", "SSDDecoderOnlyOutput", "SSDStats")  # users get them, and make none
MEMBERS = {
    "SSDGenerationMixin": ["generate"],
    "SSDConfig": ["to_dict", "from_dict", "save_pretrained", "from_pretrained"],
    "DraftAssistant": ["close"],
    "SSDStats": [
        name
        for name, value in vars(hf_ssd.SSDStats).items()
        if (inspect.isfunction(value) or isinstance(value, property)) and not name.startswith("_")
    ],
    "Roles": ["target_config", "draft", "serve", "shutdown"],
}
CHAPTERS = {
    "Generating": ["enable", "SSDGenerationMixin", "generate", "BatchStreamer"],
    "Settings": ["SSDConfig"],
    "The draft": ["launch_draft", "DraftAssistant", "DraftError"],
    "What a call returns": ["SSDDecoderOnlyOutput", "SSDStats", "RoundRecord"],
    "Under torchrun": ["distributed.init_roles", "distributed.Roles"],
    "Theory": [
        f"theory.{name}"
        for name, value in vars(theory).items()
        if inspect.isfunction(value) and value.__module__ == theory.__name__ and not name.startswith("_")
    ],
}


def find(name: str):
    """Returns what `hf_ssd.<name>` is."""
    value = hf_ssd
    for part in name.split("."):
        value = getattr(value, part)
    return value


def anchor(heading: str) -> str:
    """Returns what GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


ANCHORS = {name.split(".")[-1]: anchor(f"hf_ssd.{name}") for names in CHAPTERS.values() for name in names}


def reference(match: re.Match) -> str:
    """Turns [`~module.Name`] into a link where there is such a name here, and into the full name elsewhere."""
    path = match.group(1).removeprefix("~")
    *before, last = path.split(".")
    is_member = bool(before) and before[-1][:1].isupper()
    target = ANCHORS.get(before[-1] if is_member else last)
    shown = f"{before[-1]}.{last}" if is_member else last
    return f"`{path}`" if target is None else f"[`{shown}`](#{target})"


def markdown(text: str, first: str = "", rest: str = "") -> str:
    """Returns a paragraph, with its references, in lines of at most `WIDTH` that begin with `first` and `rest`."""
    text = re.sub(r"\[`([^`]+)`\](?!\()", reference, " ".join(text.split()))
    lines = textwrap.wrap(text, WIDTH - 1 - len(rest), break_long_words=False, break_on_hyphens=False)
    # A minus sign that comes to stand at the beginning of a line begins no list.
    lines = [re.sub(r"^([-+*#](?= )|>)", r"\\\1", line) for line in lines]
    return "\n".join((rest if i else first) + line for i, line in enumerate(lines))


def entry(text: str) -> str:
    """Turns an entry of an indented section, `name (type): what it is`, into an item of a list."""
    names = re.match(r"[\w, ]+?(?= \(|: )", text)
    if names:
        text = ", ".join(f"**{name}**" for name in names[0].split(", ")) + text[names.end() :]
    return markdown(text, "- ", "  ")


def sections(docstring: str) -> list[tuple[str, list[str]]]:
    """Returns the title, empty for the first one, and the dedented lines of each section."""
    result = [("", [])]
    for line in docstring.splitlines():
        title = re.fullmatch(r"(Args|Attributes|Raises|Returns):", line)
        if title:
            result.append((title.group(1), []))
        else:
            result[-1][1].append(line)
    return [(title, textwrap.dedent("\n".join(lines)).splitlines()) for title, lines in result]


def paragraphs(lines: list[str]) -> list[str]:
    """Returns the paragraphs; code stays as it is, with the fence around it."""
    blocks = re.split(r"(```.*?```)", "\n".join(lines), flags=re.DOTALL)
    result = []
    for block in blocks:
        if block.startswith("```"):
            result.append(block)
        else:
            result += [markdown(part) for part in re.split(r"\n\s*\n", block) if part.strip()]
    return result


def entries(lines: list[str]) -> list[str]:
    """Returns the entries of an indented section, each as one string: what is indented further belongs to the last."""
    result = []
    for line in lines:
        if line.startswith(" "):
            result[-1] += " " + line.strip()
        elif line.strip():
            result.append(line)
    return result


def description(docstring: str, renamed: dict[str, str], hidden: tuple[str, ...] = ()) -> list[str]:
    """Returns a docstring as blocks of Markdown."""
    blocks = []
    for title, lines in sections(docstring):
        if title in hidden:
            continue
        if title in INDENTED:
            blocks += [f"**{renamed.get(title, title)}**", "\n".join(entry(text) for text in entries(lines))]
        else:
            blocks += ([f"**{title}**"] if title else []) + paragraphs(lines)
    return blocks


def signature(name: str, value, is_method: bool = False) -> str:
    """Returns the call as code, one parameter a line where one line is too short for all."""
    found = inspect.signature(value)
    parameters = list(found.parameters.values())
    if is_method and parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    texts, is_marked = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not is_marked:
            texts.append("*")
            is_marked = True
        texts.append(short(str(parameter)))
    returned = "" if found.return_annotation in (found.empty, None) else f" -> {short_type(found.return_annotation)}"
    line = f"{name}({', '.join(texts)}){returned}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + f"){returned}"
    return f"```python\n{line}\n```"


def short_type(annotation) -> str:
    return short(annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))


def short(text: str) -> str:
    """Leaves out where types are defined, and what a function is that is a default."""
    text = re.sub(r"\b(?:transformers|hf_ssd|collections)\.(?:\w+\.)*(\w+)", r"\1", text)
    return re.sub(r"<function .*? at 0x\w+>", "...", text).replace("'", '"')


def chapter_entry(name: str) -> list[str]:
    """
    Returns the blocks of one public name.

    Raises:
        `SystemExit`: it has no docstring of its own.
    """
    value, last = find(name), name.split(".")[-1]
    own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    if not own or own.startswith(f"{last}("):  # the latter is what a dataclass without a docstring gets
        raise SystemExit(f"hf_ssd.{name} has no docstring.")
    blocks = [f"### hf_ssd.{name}"]
    is_given = last in GIVEN
    if not is_given and last != "SSDGenerationMixin":
        blocks.append(signature(f"hf_ssd.{name}", value))
    fields = dataclasses.is_dataclass(value) and is_given
    hidden = ("Args",) if is_given and not fields else ()
    blocks += description(inspect.getdoc(value), {"Args": "Fields" if fields else "Arguments"}, hidden)
    for member in MEMBERS.get(last, []):
        found = inspect.getattr_static(value, member)
        if not found.__doc__:
            continue  # it says what it is by its name
        blocks.append(f"#### {last}.{member}")
        if not isinstance(found, (property, functools.cached_property)):
            found = getattr(value, member)
            blocks.append(signature(member, found, is_method=True))
        blocks += description(inspect.getdoc(found), {"Args": "Arguments"})
    return blocks


def page() -> str:
    """
    Returns the whole page.

    Raises:
        `SystemExit`: a public name is in no chapter, or has no docstring.
    """
    documented = {name for names in CHAPTERS.values() for name in names}
    wanted = {*hf_ssd.__all__, *(f"distributed.{name}" for name in distributed.__all__)}
    if missing := wanted - documented:
        raise SystemExit(f"Give {', '.join(sorted(missing))} a place in CHAPTERS.")
    blocks = [HEAD]
    for chapter, names in CHAPTERS.items():
        blocks.append(f"## {chapter}")
        if chapter == "Theory":
            blocks += paragraphs(inspect.getdoc(theory).splitlines())
        for name in names:
            blocks += chapter_entry(name)
    return "\n\n".join(blocks) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "_build", help="folder for api.md")
    folder = parser.parse_args(arguments).output
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "api.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
