import pytest
from transformers.utils import logging


@pytest.fixture
def warnings(monkeypatch):
    """What the library has warned of."""
    said = []
    for module in ("hf_ssd.generation.draft", "hf_ssd.distributed.assistant"):
        monkeypatch.setattr(logging.get_logger(module), "warning", lambda text, *a: said.append(text))
    return said
