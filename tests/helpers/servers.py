"""A server of the embedded pair, run as a user would run it."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import openai
import psutil
import requests
from prometheus_client.parser import text_string_to_metric_families

import hf_ssd
from hf_ssd.cli.models import Model
from hf_ssd.cli.serve import free_port
from hf_ssd.serving.server import Server

from . import preloaded
from .processes import ends_within, within
from .programs import PAIR

START_TIMEOUT = 120.0
LONG = 20_000  # positions: a call that fills them lasts far longer than a test
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PROMPT = "abcdefgh"
REQUESTS = {  # of two tokens
    CHAT: {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2},
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 2},
    RESPONSES: {"input": PROMPT, "max_output_tokens": 2},
}


def target_folder(tmp_path_factory, **tokenizer_config) -> str:
    """Returns a folder of the embedded target with some other settings of its tokenizer."""
    folder = shutil.copytree(PAIR / "target", tmp_path_factory.mktemp("models") / "target")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | tokenizer_config))
    return str(folder)


class Said(NamedTuple):
    """A choice of an answer."""

    text: str
    reason: str  # why it ended
    logprobs: list | dict | None = None
    reasoning: str = ""
    calls: tuple[str, ...] = ()  # names of tools

    @classmethod
    def joined(cls, parts: list) -> "Said":
        """Returns the choice that the parts of a stream make, or the single part of a whole answer."""
        assert {part.finish_reason for part in parts[:-1]} <= {None}
        messages = [getattr(part, "message", None) or getattr(part, "delta", part) for part in parts]
        calls = tuple(call.function.name for one in messages for call in getattr(one, "tool_calls", None) or ())
        found, logprobs = [part.logprobs for part in parts if part.logprobs], None
        if found and hasattr(found[0], "content"):
            logprobs = [entry for one in found for entry in one.content]
        elif found:
            logprobs = {name: [x for one in found for x in getattr(one, name)] for name in found[0].model_fields_set}

        def text(*names: str) -> str:
            return "".join(getattr(one, name, None) or "" for one in messages for name in names)

        return cls(text("text", "content"), parts[-1].finish_reason, logprobs, text("reasoning_content"), calls)


def said(chunks: list) -> list[Said]:
    """Returns the choices of an answer, of which [`Client.chunks`] has the parts."""
    parts = defaultdict(list)
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        parts[choice.index].append(choice)
    return [Said.joined(parts[index]) for index in sorted(parts)]


class Client:
    """Asks a server, which has a `url` and a `model`."""

    url: str
    model: str
    key = "none"

    def connect(self) -> None:
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, timeout=100.0, max_retries=0)

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

    def gained(self, before: dict[str, float]) -> dict[str, float]:
        """Returns how much the figures have grown."""
        return {name: value - before[name] for name, value in self.figures().items()}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def live(self, **body) -> list[dict]:
        """Returns the events that the page gets for a request."""
        headers = {"authorization": f"Bearer {self.key}"}
        written = requests.post(f"{self.url}/live", json=body, headers=headers, timeout=60).content.decode()
        return [json.loads(line.removeprefix("data: ")) for line in written.split("\n\n") if line]

    def complete(self, prompt: str, tokens: int, **options):
        return self.client.completions.create(
            model=self.model, prompt=prompt, max_tokens=tokens, **{"temperature": 0, **options}
        )

    def chat(self, text: str, tokens: int, **options):
        return self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": text}],
            max_completion_tokens=tokens,
            **{"temperature": 0, **options},
        )

    def chunks(self, ask: str, prompt, tokens: int, is_streamed: bool, **options) -> list:
        """Returns the parts of an answer of `complete` or `chat`, of which a whole answer has a single one."""
        found = getattr(self, ask)(prompt, tokens, stream=is_streamed or openai.omit, **options)
        return list(found) if is_streamed else [found]

    def whole_and_streamed(self, ask: str, prompt, tokens: int, **options) -> list[list[Said]]:
        """Returns the choices of an answer that comes at once, and of one that streams."""
        return [said(self.chunks(ask, prompt, tokens, is_streamed, **options)) for is_streamed in (False, True)]

    def post(self, path: str, body: bytes, **headers: str) -> tuple[int, dict]:
        """Returns the status and the JSON of an answer."""
        names = {"content-type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        response = requests.post(self.url + path, data=body, headers=names, timeout=60)
        return response.status_code, response.json()

    def request(self, path: str, **changes) -> tuple[int, dict]:
        """Returns the status and the JSON of an answer to the usual request, with other parameters."""
        return self.post(path, json.dumps({**REQUESTS[path], **changes}).encode())

    def refusal(self, path: str, **changes) -> str:
        """Returns the sentence of a request that is refused in OpenAI's form, whole and streamed, before any work."""
        sentences, before = set(), self.figures()
        for stream in (False, True):
            status, answer = self.request(path, **{"stream": stream, **changes})
            assert status == 400, answer
            sentences.add(self.sentence(status, answer))
        assert self.gained(before)["tokens_total"] == 0
        (sentence,) = sentences
        return sentence

    @staticmethod
    def sentence(status: int, answer: dict) -> str:
        """Returns the sentence of an error, which has OpenAI's form."""
        error = answer["error"]
        assert answer.keys() == {"error"} and error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
        assert isinstance(error["message"], str) and error["message"]
        return error["message"]


class ServerProcess(Client):
    """`hf-ssd serve` in a process of its own, with what a client of it needs."""

    def __init__(self, model: str, *options: str, draft=PAIR / "draft", start=preloaded.FRESH):
        self.model = model
        command = [sys.executable, "-m", "hf_ssd", "serve", model, str(draft), "--port", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if start is preloaded.FRESH:
            environment.pop(preloaded.ADDRESS, None)  # its worker is to be its child
        self.log = tempfile.TemporaryFile("a+")  # to append to, wherever it is read
        output = {"stdout": self.log, "stderr": subprocess.STDOUT}
        self.process = start([*command, *options], env=environment, **output)
        deadline = time.monotonic() + START_TIMEOUT
        while not (found := re.search(r"http://\S+(?= shows a page)", self.written())) or not self.answers(found[0]):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"no server: {self.written()}")
            time.sleep(0.1)
        self.connect()

    def written(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def worker(self) -> psutil.Process:
        """Returns the draft's process, which has the other end of a connection that is no client's."""
        connections, port = psutil.net_connections("tcp"), urlsplit(self.url).port
        ours = [one for one in connections if one.pid == self.process.pid and one.raddr and one.laddr.port != port]
        far_ends = {(one.raddr, one.laddr) for one in ours}
        return next(psutil.Process(one.pid) for one in connections if one.pid and (one.laddr, one.raddr) in far_ends)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Interrupts it, and returns its exit code."""
        self.process.send_signal(number)
        try:
            return self.process.wait(timeout=20)
        finally:
            self.process.kill()
            self.log.close()

    def ends_with_its_worker(self, number: int) -> bool:
        """Interrupts it, and says whether it has ended well and its worker too."""
        worker = self.worker()
        return self.stop(number) == 0 and ends_within(worker.pid, 5)


class ServerThread(Client):
    """A server in this process, which starts in a moment and whose parts a test can reach."""

    def __init__(self, model: str, assistant, ssd_config=None, tokenizers=None, name=None, key="none", **options):
        self.model, self.key, port = model, key, free_port("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{port}"
        self.loaded_model, self.processor = Model(model).load_for_requests()
        hf_ssd.enable(self.loaded_model, assistant, ssd_config, **(tokenizers or {}))
        place = {"host": "127.0.0.1", "port": port, "log_level": "error"}
        names = [name or Path(model).name, model]
        self.served = Server(self.loaded_model, self.processor, assistant, names, **place, **options)
        self.thread = threading.Thread(target=self.served.server.run)
        self.thread.start()
        assert within(30, lambda: self.served.server.started)
        self.connect()

    def stop(self) -> None:
        self.client.close()
        self.served.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()
