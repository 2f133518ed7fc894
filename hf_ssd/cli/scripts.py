"""Scripts of the folder examples that are commands as well."""

import importlib
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
PLACES = (PACKAGE / "scripts", PACKAGE.parent / "examples")  # installed, and in a clone
SCRIPTS = {  # file, and what it does
    "evaluate": ("evaluate_datasets.py", "How fast are the methods on real prompts, and are the answers as good?"),
    "train-draft": ("train_draft.py", "Make a draft for any causal model, which learns from the model's own text."),
    "gpu-report": ("gpu_report.py", "Everything about this machine's GPUs in one report."),
}


def run_script(command: str, arguments: list[str]) -> int:
    """Runs a script with the words of a command line, as `python examples/SCRIPT` would, and returns the exit code."""
    file, _ = SCRIPTS[command]
    folder = next((place for place in PLACES if (place / file).is_file()), None)
    if folder is None:
        raise SystemExit(f"hf-ssd {command}: hf_ssd was installed without its scripts; install it from a clone.")
    words, paths = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [f"hf-ssd {command}", *arguments], [str(folder)]
    try:
        return importlib.import_module(Path(file).stem).main() or 0
    finally:
        sys.argv, sys.path[:] = words, paths
