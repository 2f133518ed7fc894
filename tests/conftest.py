"""Fixtures of all tests, and how their processes run."""

import contextlib
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests run at once, and with more threads than cores all crawl
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # and those that wait for each other let others compute

import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
from transformers.utils import logging

import hf_ssd
from hf_ssd.planning import planner

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from .helpers import preloaded  # noqa: E402
from .helpers.public_weights import real_cache, real_folders, real_tokenizers  # noqa: E402, F401
from .helpers.sampled_strings import SMALL  # noqa: E402
from .helpers.short_waits import sleep_soon  # noqa: E402
from .helpers.tiny import tiny_draft, tiny_model  # noqa: E402

hypothesis.settings.register_profile("tests", deadline=None)  # other programs may slow an example down
hypothesis.settings.load_profile("tests")
sleep_soon()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_is_known_of_a_pair():
    """Many tests share models, and what calls of one have taught is not to decide what those of another do."""
    planner._pairs.clear()


def pytest_configure(config):
    """Processes of xdist share one server of preloaded Python, which the process that starts them starts."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput") and preloaded.can_fork():
        server = contextlib.ExitStack()
        server.enter_context(preloaded.running_server())
        config.add_cleanup(server.close)


@pytest.fixture(scope="session", autouse=True)
def preloaded_python():
    """Workers and other Python programs start in a moment, except in tests of how they start."""
    with preloaded.preloaded_python():
        yield


@pytest.fixture
def fresh_python(monkeypatch):
    """For a test of how programs start: they start as users start them."""
    monkeypatch.setattr(subprocess, "Popen", preloaded.FRESH)
    monkeypatch.delenv(preloaded.ADDRESS, raising=False)  # and so do the programs that they start


@pytest.fixture
def warnings(monkeypatch):
    """What the library has warned of: what is wrong with a draft."""
    said = []
    for module in ("generation.draft", "distributed.assistant", "distributed.several_drafts"):
        logger = logging.get_logger(f"hf_ssd.{module}")
        monkeypatch.setattr(logger, "warning", lambda text, *_: said.append(text))
    return said


@pytest.fixture(scope="session")
def target():
    return hf_ssd.enable(tiny_model())


@pytest.fixture(scope="session")
def draft():
    return tiny_draft()


@pytest.fixture(scope="session")
def assistant(draft):
    """A worker process that many tests share."""
    with hf_ssd.launch_draft(draft, num_threads=1) as assistant:
        yield assistant


@pytest.fixture(scope="session")
def small():
    """A pair whose vocabulary is so small that distributions are exact."""
    sizes = {"vocab_size": SMALL, "initializer_range": 0.12}
    return hf_ssd.enable(tiny_model(seed=3, **sizes)), tiny_draft(seed=3, disagreement=0.12, **sizes)
