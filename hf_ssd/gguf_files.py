"""Models that are GGUF files: where a path leads to one, and what its header says."""

import copy
import functools
import os
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

OTHER_MODELS = ("config.json", "adapter_config.json")  # a folder with one of these is read as transformers does


def gguf_place(path: str | os.PathLike, options: dict) -> tuple[str, dict]:
    """Returns the folder and options with which `from_pretrained` reads a path, which may lead to a GGUF file."""
    path, place = os.fspath(path), Path(path)
    if options.get("gguf_file") is not None:
        return path, options
    if is_gguf(path):
        return str(place.parent), {**options, "gguf_file": place.name}
    if place.suffix.lower() == ".gguf" and not place.exists() and place.parent.is_dir():
        raise ValueError(f"There is no file {path!r}; give a GGUF file, a folder with a model, or a hub id.")
    if place.is_dir() and not any((place / name).exists() for name in OTHER_MODELS):
        files = sorted(file.name for file in place.glob("*.gguf"))
        if len(files) > 1:
            raise ValueError(f"The folder {path!r} has {len(files)} GGUF files; name one of them, as in {files[0]!r}.")
        if files:
            return path, {**options, "gguf_file": files[0]}
    return path, options


def is_gguf(path: str | os.PathLike) -> bool:
    """Whether the path is a GGUF file, which transformers would read as JSON to the end where it expects a config."""
    return Path(path).suffix.lower() == ".gguf" and os.path.isfile(path)


def config_of(path: str, options: dict) -> PreTrainedConfig:
    """Reads a model's config. That of a GGUF file is remembered, because reading its header takes seconds."""
    file = options.get("gguf_file") and Path(path, options["gguf_file"])
    if file and file.is_file():
        stat = file.stat()
        return copy.deepcopy(_config_of_file(path, options["gguf_file"], stat.st_mtime_ns, stat.st_size))
    return AutoConfig.from_pretrained(path, **options)


@functools.lru_cache(maxsize=8)
def _config_of_file(folder: str, file: str, changed: int, size: int) -> PreTrainedConfig:
    return AutoConfig.from_pretrained(folder, gguf_file=file)
