"""How the program starts, and how the server starts, is named, and ends."""

import logging
import pickle
import signal
import subprocess
import sys
import threading
from urllib.parse import urlsplit

import openai
import psutil
import pytest

import hf_ssd

from ..serving.conftest import PAIR, ServerProcess, ServerThread, tiny_folder, within  # noqa: F401

LIGHT = """
import sys
from hf_ssd.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert "torch" not in sys.modules and "transformers" not in sys.modules, "what takes seconds was imported"
    raise
raise AssertionError("the command was run")
"""


def python(program: str, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=120)


# ---------------------------------------------------------------- start-up


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["chek"], []], ids=" ".join)
def test_help_and_version_import_neither_torch_nor_transformers(words, fresh_python):
    done = python(LIGHT, *words)
    assert done.returncode == (0 if words and words[0][0] == "-" else 2), done.stderr
    assert "hf-ssd" in (done.stdout or done.stderr)


def test_a_config_is_made_and_pickled_without_torch_and_transformers(fresh_python):
    program = """
import pickle, sys
import hf_ssd
assert {*hf_ssd.__all__, "distributed", "theory", "__version__"} <= {*dir(hf_ssd)}
assert pickle.loads(pickle.dumps(hf_ssd.SSDConfig(lookahead=3))) == hf_ssd.SSDConfig(lookahead=3)
assert "torch" not in sys.modules and "transformers" not in sys.modules, "what takes seconds was imported"
"""
    done = python(program)
    assert done.returncode == 0, done.stderr


def test_public_names_are_what_their_modules_have():
    names = {}
    exec("from hf_ssd import *", names)
    for name in hf_ssd.__all__:
        found = getattr(hf_ssd, name)
        assert names[name] is found and found.__name__ == name
        assert pickle.loads(pickle.dumps(found)) is found
    assert hf_ssd.distributed.init_roles and hf_ssd.theory.predict
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = hf_ssd.nothing
    with pytest.raises(ImportError, match="nothing"):
        exec("from hf_ssd import nothing")


# ---------------------------------------------------------------- the server


@pytest.fixture(scope="module")
def named(tiny_folder, assistant):  # noqa: F811
    """A server whose model has a name of its own, and which notes the ports it listened to when it said so."""
    listened = []

    def note() -> None:
        connections = psutil.Process().net_connections("tcp")
        listened.extend(one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN)

    plan = hf_ssd.SSDConfig(lookahead=3, budget=4)
    server = ServerThread(tiny_folder, assistant, plan, served_model_name="org/small", on_listening=note)
    server.listened = listened
    yield server
    server.stop()


def test_the_address_is_said_when_the_server_listens(named):
    assert urlsplit(named.url).port in named.listened


def test_each_name_of_the_model_works_and_the_one_that_comes_back_too(named):
    assert [model.id for model in named.client.models.list()] == ["org/small"]
    for name in ("org/small", named.model, f"{named.model}@main"):
        assert named.client.models.retrieve(name).id == "org/small"
        messages = [{"role": "user", "content": "abc"}]
        answers = [
            named.client.completions.create(model=name, prompt="abc", max_tokens=2),
            named.client.chat.completions.create(model=name, messages=messages, max_tokens=2),
            named.client.responses.create(model=name, input="abc", max_output_tokens=2, stream=False),
            *named.client.completions.create(model=name, prompt="abc", max_tokens=2, stream=True),
        ]
        assert {answer.model for answer in answers} == {"org/small"}
    with pytest.raises(openai.BadRequestError, match="one model, org/small; the request names other"):
        named.client.completions.create(model="other", prompt="abc", max_tokens=2)
    with pytest.raises(openai.NotFoundError, match="one model, org/small"):
        named.client.models.retrieve("other")


def test_the_log_level_is_that_of_all_that_the_server_writes(named):
    assert not named.served.server.config.access_log
    for name in ("transformers", "uvicorn.error", "uvicorn.access"):
        assert logging.getLogger(name).level == logging.ERROR


def test_ctrl_c_amid_an_answer_ends_in_one_line():
    server = ServerProcess(str(PAIR / "target"), "--lookahead", "3", "--budget", "4")
    asking = threading.Thread(target=lambda: pytest.raises(openai.APIError, server.complete, "def test_", 2000))
    asking.start()
    assert within(60, lambda: server.figures()["tokens_total"] > 0)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(timeout=30) == 0
    asking.join(30)
    lines = server.written().rstrip().split("\n")
    after = lines[1 + next(i for i, line in enumerate(lines) if "shows a page" in line) :]
    server.log.close()
    assert after == ["The server has ended."]
