"""Tokens that a grammar leaves no choice about: the keys of a JSON schema, for example."""

from collections.abc import Callable

from transformers import LogitsProcessorList


def forced_by(processors: LogitsProcessorList) -> Callable[[int, list[int]], list[int]] | None:
    """
    Returns the function of the first processor that has one, as [`~hf_ssd.Grammar`] has: the tokens that must follow in
    a row once it has gained some tokens. `None` if no processor forces tokens.
    """
    return next((processor.forced for processor in processors if hasattr(processor, "forced")), None)
