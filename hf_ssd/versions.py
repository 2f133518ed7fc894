"""The releases of transformers and torch that this package was tested with, and what to say about others."""

import functools
import importlib.metadata

from packaging.requirements import Requirement

NAMES = ("transformers", "torch")
INTERNALS = ("_prefill", "_optimize_model_for_decode", "_supports_default_dynamic_cache")
"""Methods of `GenerationMixin` that are not public, and that a call needs."""


def tested() -> dict[str, Requirement]:
    """Returns the requirements of this package's own metadata by name, none if the package is not installed."""
    try:
        requirements = map(Requirement, importlib.metadata.requires("hf_ssd") or ())
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {one.name: one for one in requirements if one.name in NAMES and one.marker is None}


def sentence() -> str:
    """Names the installed releases and the tested releases."""
    installed = " and ".join(f"{name} {importlib.metadata.version(name)}" for name in NAMES)
    ranges = " and ".join(f"{name}{one.specifier}" for name, one in tested().items())
    return f"hf_ssd runs on {installed}" + (f", and is tested on {ranges}" if ranges else "")


@functools.cache
def warn_if_untested() -> None:
    """Warns in the first call of a program if an installed release is outside of the tested range."""
    from transformers.utils import logging  # not at the top: the sentence is also for an import that fails

    for name, one in tested().items():
        if not one.specifier.contains(importlib.metadata.version(name), prereleases=True):
            logging.get_logger(__name__).warning(f"{sentence()}. If a call fails, install tested releases.")
            return


def check_internals(model, cache_argument: str, model_kwargs: dict) -> None:
    """Raises `RuntimeError` if this transformers lacks an internal that a call needs, as a later release may."""
    missing = [f"The method `{name}` of models" for name in INTERNALS if not hasattr(model, name)]
    if not missing and model_kwargs.get(cache_argument) is None and model._supports_default_dynamic_cache():
        missing = [f"The cache `{cache_argument}` of generate()"]
    if missing:
        raise RuntimeError(f"{sentence()}. {missing[0]} is missing; install a tested release of transformers.")


def explain(error: ImportError) -> None:
    """Raises `ImportError` with the releases, if the name that could not be imported is one of theirs."""
    if (error.name or "").partition(".")[0] in NAMES:
        raise ImportError(f"{sentence()}. {error}; install tested releases.", name=error.name) from error
