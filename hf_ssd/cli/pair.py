"""The small pair of models that comes with the package."""

from .scripts import PACKAGE

PLACES = (PACKAGE / "pair", PACKAGE.parent / "examples" / "pair")  # installed, and in a clone


def folder(name: str) -> str:
    """Returns the folder of the pair's `"target"`, `"draft"`, `"parallel_draft"` or `"eagle3"`."""
    for place in PLACES:
        if (place / name / "config.json").is_file():
            return str(place / name)
    raise ValueError(f"hf_ssd was installed without its pair of models ({name}); name a TARGET and a DRAFT.")
