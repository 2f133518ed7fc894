import pytest

from ..helpers.preparing import preparing
from ..helpers.vocabularies import printable


@pytest.fixture
def prepared_in_process():
    """Prepares ahead of time in this process, for a whole test."""
    with preparing() as hits:
        yield hits


@pytest.fixture(scope="session")
def tokenizer():
    return printable()
