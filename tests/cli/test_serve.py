"""How `hf-ssd serve` begins and ends. What it serves is tested in tests/serving."""

import importlib.util
import signal
import socket

import pytest

from hf_ssd.cli.main import main
from hf_ssd.cli.serve import NEEDED

from ..helpers.servers import PAIR, ServerProcess


def refused(capsys, *words: str) -> str:
    assert main(["serve", *words]) == 2
    return capsys.readouterr().err


def test_what_cannot_be_served_is_said_before_anything_is_loaded(capsys, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"Cannot listen on 127.0.0.1 port {port}" in refused(capsys, "--port", port)
    assert "Cannot listen on 127.0.0.1 port 99999" in refused(capsys, "--port", "99999")
    assert "There are two drafts" in refused(capsys, "target", "draft", "--draft", "draft")
    assert "DRAFT is missing: hf-ssd serve target DRAFT" in refused(capsys, "target", "--port", "0")
    assert "There is no folder './nowhere'" in refused(capsys, "./nowhere", "./either", "--port", "0")
    found = {name: importlib.util.find_spec(name) for name in NEEDED} | {"uvicorn": None}
    monkeypatch.setattr("hf_ssd.cli.serve.importlib.util.find_spec", found.get)
    assert 'serving needs uvicorn: pip install "hf_ssd[serve]"' in refused(capsys)


@pytest.mark.slow
def test_sigterm_ends_it_although_clients_wait():
    """Eight answers of two thousand tokens take turns, which lasts far longer than the server gives them."""
    server = ServerProcess(str(PAIR / "target"))
    streams = [server.complete("def test_", 2000, stream=True) for _ in range(8)]
    next(iter(streams[0]))
    assert server.ends_with_its_worker(signal.SIGTERM)
    for stream in streams:
        stream.close()
