"""What a chat reads from a terminal, and warnings that do not interrupt its text."""

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from logging.handlers import MemoryHandler

QUOTES = '"""'
HINT = "Type /quit or press Ctrl-D to leave."


def prepare() -> None:
    """Lets the user edit lines and paste several of them at once, and replaces typed bytes that are no characters."""
    with contextlib.suppress(ImportError):
        import readline  # input() uses it from then on

        if "libedit" not in (readline.__doc__ or ""):  # which knows no such setting
            readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")


def read_message() -> str:
    """Returns the next message: a line, a paste, or the lines between two lines of quotes; `EOFError` at the end."""
    words = input("> ").rstrip("\n")  # a paste may end with a line's end
    if not words.startswith(QUOTES) or "\n" in words:
        return words
    text = words.removeprefix(QUOTES)
    with contextlib.suppress(EOFError):  # the message ends with the input
        while not text.rstrip().endswith(QUOTES):
            text += f"\n{input('... ')}"
    return text.rstrip().removesuffix(QUOTES).strip("\n")


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
