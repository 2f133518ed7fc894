"""The small pair of models that comes with the package."""

from pathlib import Path

PACKAGE = Path(__file__).parent.parent
PLACES = (PACKAGE / "pair", PACKAGE.parent / "examples" / "pair")  # installed, and in a clone


def folder(name: str) -> str:
    """Returns the folder of a model that belongs to the pair, such as `"target"` or `"draft"`."""
    for place in PLACES:
        if (place / name / "config.json").is_file():
            return str(place / name)
    raise ValueError(f"hf_ssd was installed without its pair of models ({name}); name a TARGET and a DRAFT.")
