"""Holds warnings back until a text has been streamed."""

import contextlib
import logging
from collections.abc import Iterator
from logging.handlers import MemoryHandler


@contextlib.contextmanager
def warnings_held() -> Iterator[None]:
    """Shows the warnings that hf_ssd logs inside this context after it, so that they do not interrupt a text."""
    logger = logging.getLogger("hf_ssd")
    held = MemoryHandler(capacity=1000, flushLevel=logging.CRITICAL + 1, target=logging.lastResort)
    logger.addHandler(held)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(held)
        held.close()  # shows the warnings
