"""Teaches mkdocstrings how transformers writes docstrings: its references, and its types in backticks."""

import re

import griffe

import hf_ssd
from hf_ssd import distributed

NAMES = {name: f"hf_ssd.{name}" for name in hf_ssd.__all__}
NAMES |= {name: f"hf_ssd.distributed.{name}" for name in distributed.__all__}
ARGUMENT = r"^(?: +[\w, ]+ )\(.*?\)(?=:)"  # name (`type`, *optional*, defaults to `value`): ...
RAISED = r"^(?: +)(?:\[?`[\w.~]+`\]?(?:, )?)+(?=:)"  # `type`, [`~module.type`]: ...


def plain(match: re.Match) -> str:
    """Leaves the types alone: mkdocstrings sets them in code, and reads defaults from the signature."""
    text = re.sub(r"\[?`~?([^`]*)`\]?", r"\1", match[0])
    return re.sub(r",? ?\*optional\*.*\)", ")", text)


def link(match: re.Match) -> str:
    """Turns [`~module.Name`] into a link where the reference has such a name, and into the name elsewhere."""
    *_, before, name = ["", *match[1].removeprefix("~").split(".")]
    if before in NAMES:
        return f"[`{before}.{name}`][{NAMES[before]}.{name}]"
    return f"[`{name}`][{NAMES[name]}]" if name in NAMES else f"`{name}`"


class TransformersDocstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring is not None:
            text = re.sub(f"{ARGUMENT}|{RAISED}", plain, obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"\[`([^`]+)`\](?![\[(])", link, text)
