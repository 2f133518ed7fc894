"""Warnings that wait until a text has been streamed."""

import contextlib
import logging
from collections.abc import Iterator
from logging.handlers import MemoryHandler


@contextlib.contextmanager
def warnings_held() -> Iterator[None]:
    """Shows what hf_ssd logs inside this context after it, so that no warning lands inside a text that is streamed."""
    logger = logging.getLogger("hf_ssd")
    held = MemoryHandler(capacity=1000, flushLevel=logging.CRITICAL + 1, target=logging.lastResort)
    logger.addHandler(held)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(held)
        held.close()  # which shows them
