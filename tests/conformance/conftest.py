import pytest

from ..helpers.preparing import preparing


@pytest.fixture
def prepared_in_process():
    """Prepares ahead of time in this process, for a whole test."""
    with preparing() as hits:
        yield hits
