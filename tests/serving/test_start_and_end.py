"""How the program starts, and how the server starts, is named, and ends."""

import logging
import pickle
import re
import signal
import subprocess
import threading
import time
from urllib.parse import urlsplit

import openai
import psutil
import pytest
import torch

import hf_ssd
from hf_ssd.cli.main import COMMANDS
from hf_ssd.cli.models import Model
from hf_ssd.cli.serve import free_port
from hf_ssd.serving.server import Server

from ..helpers.programs import run
from ..helpers.servers import LONG, ServerProcess, ServerThread
from ..helpers.tiny import ready

LIGHT = """
import sys
from hf_ssd.cli.main import main
try:
    sys.exit(main(sys.argv[1:]))
finally:
    assert "torch" not in sys.modules and "transformers" not in sys.modules, "what takes seconds was imported"
"""


# ---------------------------------------------------------------- start-up


USAGE = ["usage: hf-ssd", *COMMANDS]
LIGHT_WORDS = {"--help": USAGE, "": USAGE, "--version": ["hf-ssd", hf_ssd.__version__], "chek": ["hf-ssd"]}


@pytest.mark.parametrize("word", LIGHT_WORDS)
def test_help_and_version_import_neither_torch_nor_transformers(word, fresh_python):
    said = run("-c", LIGHT, *filter(None, [word]), status=2 if word == "chek" else 0)
    assert all(expected in said for expected in LIGHT_WORDS[word])


def test_a_config_is_made_and_pickled_without_torch_and_transformers(fresh_python):
    run(
        "-c",
        """
import pickle, sys
import hf_ssd
assert {*hf_ssd.__all__, "distributed", "theory", "__version__"} <= {*dir(hf_ssd)}
assert pickle.loads(pickle.dumps(hf_ssd.SSDConfig(lookahead=3))) == hf_ssd.SSDConfig(lookahead=3)
assert "torch" not in sys.modules and "transformers" not in sys.modules, "what takes seconds was imported"
""",
    )


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
def named(tiny_folder, assistant):
    """A server whose model has a name of its own, and which notes what there was when it said that it listens."""
    before, noted = ready(assistant).sessions, {}

    def note() -> None:
        connections = psutil.Process().net_connections("tcp")
        noted["ports"] = [one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN]
        noted["answers"] = assistant.sessions - before

    plan = hf_ssd.SSDConfig(lookahead=3, budget=4)
    with ServerThread(tiny_folder, assistant, plan, name="org/small", on_listening=note) as server:
        server.noted, noted["figures"] = noted, server.figures()
        yield server


def test_the_address_is_said_when_the_server_listens_and_has_generated_a_first_answer_with_the_draft(named):
    assert urlsplit(named.url).port in named.noted["ports"] and named.noted["answers"] == 1
    assert named.noted["figures"]["tokens_total"] == named.noted["figures"]["finished"] == 0, "no client has asked"
    assert not named.served.server.config.access_log
    for name in ("transformers", "uvicorn.error", "uvicorn.access"):
        assert logging.getLogger(name).level == logging.ERROR


def warming(folder: str, generate) -> tuple[Server, list]:
    """Returns a server whose model generates so, and a list that is empty until the server listens."""
    model, processor = Model(folder).load_for_requests()
    model.generate, listened = generate, []
    options = {"host": "127.0.0.1", "port": free_port("127.0.0.1", 0), "log_level": "error"}
    return Server(model, processor, None, ["small"], on_listening=lambda: listened.append(1), **options), listened


def test_a_server_whose_model_cannot_generate_does_not_listen(tiny_folder):
    def generate(**kwargs):
        raise ValueError("The model does not generate.")

    server, listened = warming(tiny_folder, generate)
    with pytest.raises(ValueError, match="The model does not generate."):
        server.server.run()
    assert not listened


def test_a_server_that_is_interrupted_before_it_listens_ends(tiny_folder):
    def generate(streamer, **kwargs):
        server.server.should_exit = True
        while True:
            streamer.put(torch.tensor([5]))
            time.sleep(0.01)

    server, listened = warming(tiny_folder, generate)
    server.server.run()
    assert not listened


def test_each_name_of_the_model_works_and_the_one_that_comes_back_too(named):
    assert [model.id for model in named.client.models.list()] == ["org/small"]
    for name in ("org/small", named.model):
        assert named.client.models.retrieve(name).id == "org/small"
        messages = [{"role": "user", "content": "abc"}]
        answers = [
            named.client.completions.create(model=name, prompt="abc", max_tokens=2),
            named.client.chat.completions.create(model=name, messages=messages, max_tokens=2),
            named.client.responses.create(model=name, input="abc", max_output_tokens=2),
            *named.client.completions.create(model=name, prompt="abc", max_tokens=2, stream=True),
        ]
        assert {answer.model for answer in answers} == {"org/small"}
    with pytest.raises(openai.BadRequestError, match="one model, org/small; the request names other"):
        named.client.completions.create(model="other", prompt="abc", max_tokens=2)
    with pytest.raises(openai.NotFoundError, match="one model, org/small"):
        named.client.models.retrieve("other")


@pytest.mark.slow
def test_a_seed_repeats_an_answer_whatever_is_planned_and_without_the_draft(tiny_folder, tiny_draft_folder):
    with ServerProcess(tiny_folder, draft=tiny_draft_folder) as server:
        ask = lambda seed: server.complete("abcdefgh", 40, temperature=1.0, seed=seed).choices[0].text  # noqa: E731
        texts = [ask(5) for _ in range(4)]
        server.worker().kill()
        assert {*texts, ask(5)} == {texts[0]} and ask(6) != texts[0]


@pytest.mark.slow
def test_sigterm_amid_answers_ends_in_one_line_and_all_clients_get_an_error(tiny_folder, tiny_draft_folder):
    """A stream is under way, which must not look complete, and two other answers wait for its place."""
    options = ("--lookahead", "3", "--budget", "4", "--log-level", "warning", "--max-rows", "1")
    server, caught = ServerProcess(tiny_folder, *options, draft=tiny_draft_folder, start=subprocess.Popen), []

    def ask() -> None:
        with pytest.raises(openai.InternalServerError, match="The server ends.") as error:
            server.complete("abc", LONG)
        caught.append(error.value)

    stream, asking = iter(server.complete("abc", LONG, stream=True)), threading.Thread(target=ask)
    texts = [next(stream).choices[0].text]
    asking.start()
    waiting = server.chat("abc", 5, stream=True)
    time.sleep(0.5)  # until the other one waits too
    server.process.send_signal(signal.SIGTERM)
    for rest in ((texts.append(chunk.choices[0].text) for chunk in stream), waiting):
        with pytest.raises(openai.APIError, match="The server ends.") as error:
            list(rest)
        assert error.value.type == "server_error" and "".join(texts)
    asking.join(30)
    assert server.process.wait(timeout=30) == 0
    assert (caught[0].status_code, caught[0].type) == (503, "server_error")
    text = server.written()
    server.log.close()
    lines = text[text.index("shows a page") :].splitlines()[1:]
    ours = [line.split(maxsplit=1)[-1] for line in lines if not line.startswith("[transformers]")]
    assert ours[-1] == "server has ended." and len(ours) == 4
    chat, streamed, refused = sorted(ours[:-1])
    assert chat.startswith("POST /v1/chat/completions 200") and refused.startswith("POST /v1/completions 503")
    assert re.fullmatch(r"POST /v1/completions 200: [0-9]+ tokens in [0-9.]+ s, [0-9.]+ tokens/s", streamed)
