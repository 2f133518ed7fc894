"""How does a server behave under load? Several clients at once, some of which leave or send what is no request.

    python examples/load.py examples/pair/target --draft examples/pair/draft --clients 1 4 16 --seconds 30
    python examples/load.py folder/target --draft folder/draft --kill-draft-every 10
    python examples/load.py folder/target --draft folder/draft --servers hf_ssd transformers llama.cpp

Each server is started with the target, `hf_ssd` and `llama.cpp` with the draft too, in float32 and on the same cores.
llama.cpp is the one of `compare_engines.py`, in an environment below --environments. Each client streams one completion
after the other. A share of them leaves in the middle, and a share of bodies is no request. Every greedy answer is
compared with the one that the same prompt got when the server had nothing else to do. Printed are tokens per second of
all clients, the time to the first token and of a whole answer, the median and the 95th percentile, and by how much the
server's memory has grown.
"""

import argparse
import asyncio
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from compare_engines import RUNNERS, installed
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from hf_ssd.distributed.cores import available_cores

PROMPTS = (
    "def read_lines(path):\n    ",
    "import os\n\n\ndef walk(folder):\n    for ",
    "class Stack:\n    def __init__(self):\n        ",
    "def fibonacci(n):\n    if n < 2:\n        ",
    "try:\n    import json\nexcept ",
    "for line in open(path):\n    print(",
)
START_TIMEOUT, REQUEST_TIMEOUT, END_TIMEOUT = 300.0, 900.0, 60.0  # seconds
ROWS = 8  # that a server decodes at a time, where it can be told


def hf_ssd_server(args: argparse.Namespace, port: int) -> list[str]:
    draft = ["--draft", args.draft] if args.draft else []
    own = ["--port", str(port), "--dtype", "float32", "--max-rows", str(ROWS)]
    return [sys.executable, "-m", "hf_ssd", "serve", args.target, *draft, *own, *args.serve]


def transformers_server(args: argparse.Namespace, port: int) -> list[str]:
    program = [sys.executable, "-m", "transformers.cli.transformers", "serve"]
    return [*program, args.target, "--port", str(port), "--dtype", "float32"]


def batching_transformers_server(args: argparse.Namespace, port: int) -> list[str]:
    return [*transformers_server(args, port), "--continuous-batching"]


def llama_cpp_server(args: argparse.Namespace, port: int) -> list[str]:
    python, program = installed("xllamacpp", args.environments), RUNNERS / "serve_llama_cpp.py"
    numbers = [str(number) for number in (port, ROWS, len(available_cores()))]
    return [str(python), str(program), *numbers, args.target, *([args.draft] if args.draft else [])]


SERVERS = {
    "hf_ssd": hf_ssd_server,
    "transformers": transformers_server,
    "transformers, continuous batching": batching_transformers_server,
    "llama.cpp": llama_cpp_server,
}


class Load:
    """What clients have seen of a server. `tokenizer` makes tokens of prompts, for a server that takes no texts."""

    def __init__(self, args: argparse.Namespace, url: str, tokenizer=None):
        import openai  # of the extra `clients`

        self.args, self.url, self.tokenizer = args, url, tokenizer
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=REQUEST_TIMEOUT, max_retries=0)
        self.alone: dict[str, str] = {}
        self.forget()

    def forget(self) -> None:
        self.first, self.whole, self.tokens = [], [], 0
        self.counts = dict.fromkeys(("answered", "left", "refused", "other text", "failed"), 0)

    async def ask(self, prompt: str, leaves_after: int | None = None) -> str:
        """Streams an answer, and returns its text. Closes the stream after so many pieces, if a number is given."""
        begun, text, pieces, used = time.perf_counter(), "", 0, None
        stream = await self.client.completions.create(
            model=self.args.target,
            prompt=prompt if self.tokenizer is None else self.tokenizer(prompt).input_ids,
            max_tokens=self.args.tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            used = chunk.usage or used
            if chunk.choices and chunk.choices[0].text:
                if not pieces:
                    self.first.append(time.perf_counter() - begun)
                text, pieces = text + chunk.choices[0].text, pieces + 1
            if pieces == leaves_after:
                await stream.close()
                break
        else:
            self.whole.append(time.perf_counter() - begun)
        self.tokens += used.completion_tokens if used else pieces
        return text

    async def client_of(self, number: int, end: float) -> None:
        """Asks until the time is over."""
        choices = random.Random(number)
        while time.perf_counter() < end:
            prompt, chance = choices.choice(PROMPTS), choices.random()
            try:
                if chance < self.args.bad:
                    status = await asyncio.to_thread(post, f"{self.url}/v1/completions", b'{"prompt": ["no')
                    self.counts["refused" if 400 <= status < 500 else "failed"] += 1
                elif chance < self.args.bad + self.args.leave:
                    await self.ask(prompt, leaves_after=choices.randint(1, 5))
                    self.counts["left"] += 1
                else:
                    is_same = await self.ask(prompt) == self.alone[prompt]
                    self.counts["answered" if is_same else "other text"] += 1
            except Exception as error:  # of the connection, or of the server's answer
                self.counts["failed"] += 1
                tqdm.write(f"{type(error).__name__}: {error}"[:200], file=sys.stderr)

    async def learn(self) -> None:
        """Asks for each prompt alone."""
        for prompt in PROMPTS:
            self.alone[prompt] = await self.ask(prompt)
            self.alone[prompt] = await self.ask(prompt)

    async def run(self, clients: int, kill) -> dict[str, str]:
        """Returns the figures of so many clients."""
        self.forget()
        begun = time.perf_counter()
        end = begun + self.args.seconds
        everybody = asyncio.gather(*(self.client_of(number, end) for number in range(clients)))
        while self.args.kill_draft_every and not everybody.done():
            await asyncio.wait([everybody], timeout=self.args.kill_draft_every)
            if time.perf_counter() < end:
                kill()
        await everybody
        seconds = time.perf_counter() - begun
        return {
            "clients": str(clients),
            "tokens/s": f"{self.tokens / seconds:.1f}",
            "first token, s": in_words(self.first),
            "answer, s": in_words(self.whole),
            **{name: str(count) for name, count in self.counts.items()},
        }


def post(url: str, body: bytes) -> int:
    """Returns the status of the answer to a body."""
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def in_words(values: list[float]) -> str:
    """Returns median and 95th percentile."""
    if len(values) < 2:
        return "-"
    return f"{statistics.median(values):.3f} ({statistics.quantiles(values, n=20)[-1]:.3f})"


def kill_drafts(pid: int) -> None:
    """Kills the server's draft workers."""
    subprocess.run(["pkill", "-KILL", "-P", str(pid), "-f", "hf_ssd.distributed.worker"], check=False)


def memory_of(pid: int) -> int:
    """Returns the kilobytes of memory that a process has."""
    return int(subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True).stdout)


def start(command: list[str], url: str) -> subprocess.Popen:
    """Starts a server, and returns its process once it answers."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=REQUEST_TIMEOUT):
                return process
        except OSError:
            time.sleep(0.5)
    process.kill()
    raise RuntimeError(f"It has not started: {' '.join(command)}")


def end(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()


async def measure(name: str, args: argparse.Namespace) -> list[dict[str, str]]:
    """Returns the figures of a server for each number of clients."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, rows = f"http://127.0.0.1:{port}", []
    process = start(SERVERS[name](args, port), url)
    try:
        load = Load(args, url, AutoTokenizer.from_pretrained(args.target) if name == "llama.cpp" else None)
        await load.learn()
        for clients in tqdm(args.clients, desc=name, unit="number of clients"):
            before = memory_of(process.pid)
            row = {"server": name} | await load.run(clients, lambda: kill_drafts(process.pid))
            rows.append(row | {"memory, MB": f"{(memory_of(process.pid) - before) / 1024:+.0f}"})
    finally:
        end(process)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder of the target")
    parser.add_argument("--draft", help="folder of its draft")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=["hf_ssd"])
    parser.add_argument("--environments", type=Path, default=Path("engines"), help="folder for llama.cpp")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="further options of `hf-ssd serve`, last")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--seconds", type=float, default=120.0, help="for each number of clients")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--leave", type=float, default=0.1, help="share of requests whose client leaves")
    parser.add_argument("--bad", type=float, default=0.05, help="share of bodies that are no request")
    parser.add_argument("--kill-draft-every", type=float, default=0.0, metavar="SECONDS", help="of hf_ssd alone")
    args = parser.parse_args()
    args.environments = args.environments.resolve()
    rows = []
    for name in args.servers:
        try:
            rows += asyncio.run(measure(name, args))
        except Exception as error:  # of a server; the others are measured all the same
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    if not rows:
        raise SystemExit("No server was measured.")
    print("| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(row.values()) + " |")
    if any(int(row[name]) for row in rows if row["server"] == "hf_ssd" for name in ("other text", "failed")):
        raise SystemExit("Some answers were lost or had another text.")


if __name__ == "__main__":
    main()
