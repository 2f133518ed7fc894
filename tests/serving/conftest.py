"""A server of the embedded pair, run as a user would run it."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from .. import preloaded

PAIR = Path(__file__).parents[2] / "examples" / "pair"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
START_TIMEOUT = 120.0


class ServerProcess:
    """`hf-ssd serve` in a process of its own, with what a client of it needs."""

    def __init__(self, model: str, *options: str):
        self.model = model
        command = [sys.executable, "-m", "hf_ssd", "serve", model, str(PAIR / "draft"), "--port", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment.pop(preloaded.ADDRESS, None)  # its worker is to be its child
        self.log = tempfile.TemporaryFile("a+")  # to append to, wherever it is read
        output = {"stdout": self.log, "stderr": subprocess.STDOUT}
        self.process = preloaded.FRESH([*command, *options], env=environment, **output)
        deadline = time.monotonic() + START_TIMEOUT
        while not (found := re.search(r"http://\S+(?= shows a page)", self.written())) or not self.answers(found[0]):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"no server: {self.written()}")
            time.sleep(0.1)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=100.0, max_retries=0)

    def written(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def answers(self, url: str) -> bool:
        self.url = url
        with contextlib.suppress(OSError):
            return bool(self.get("/health"))
        return False

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=20) as response:
            return response.read().decode()

    @property
    def draft_state(self) -> str:
        return json.loads(self.get("/health"))["draft"]

    def figures(self) -> dict[str, float]:
        """Returns the samples of /metrics by name, those of requests by how they ended."""
        families = text_string_to_metric_families(self.get("/metrics"))
        samples = [sample for family in families for sample in family.samples]
        return {sample.labels.get("end", sample.name.removeprefix("hf_ssd_")): sample.value for sample in samples}

    def worker(self) -> psutil.Process:
        """Returns the draft's process."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if "hf_ssd.distributed.worker" in " ".join(child.cmdline()))

    def complete(self, prompt: str, tokens: int, **options):
        return self.client.completions.create(
            model=self.model, prompt=prompt, max_tokens=tokens, **{"temperature": 0, **options}
        )

    def stop(self) -> int:
        """Interrupts it, and returns its exit code."""
        self.process.terminate()
        try:
            return self.process.wait(timeout=20)
        finally:
            self.process.kill()
            self.log.close()


def within(seconds: float, condition) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


@pytest.fixture(scope="package")
def chat_model(tmp_path_factory) -> str:
    """Returns a folder of the embedded target with the simplest chat template."""
    folder = tmp_path_factory.mktemp("models") / "target"
    folder.mkdir()
    for file in (PAIR / "target").iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return str(folder)


@pytest.fixture(scope="package")
def server(chat_model):
    """A server whose plan is fixed, so that it speculates however busy the machine is."""
    server = ServerProcess(chat_model, "--lookahead", "3", "--budget", "4")
    yield server
    assert server.stop() == 0
