import pytest

from hf_ssd.cache import ragged


@pytest.fixture
def no_room(monkeypatch):
    """Caches that must grow with each new column."""
    monkeypatch.setattr(ragged, "ROOM", 0)
    monkeypatch.setattr(ragged, "ROOM_SHARE", 0.0)
