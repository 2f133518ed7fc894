"""How does a server behave under load? Several clients at once, some of which leave or send what is no request.

    python examples/load.py examples/pair/target --draft examples/pair/draft --clients 1 4 16 --seconds 30
    python examples/load.py folder/target --draft folder/draft --kill-draft-every 10
    python examples/load.py --url http://127.0.0.1:8001 --model name --clients 1 4 16

The first two start `hf-ssd serve`; the third measures a server that runs, also another one. Each client streams one
completion after the other. A share of them leaves in the middle, and a share of bodies is no request. Every greedy
answer is compared with the one that the same prompt got when the server had nothing else to do. Printed are tokens per
second of all clients, the time to the first token and between two tokens, the median and the 95th percentile, and by
how much the server's memory has grown.
"""

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request

from tqdm.auto import tqdm

PROMPTS = (
    "def read_lines(path):\n    ",
    "import os\n\n\ndef walk(folder):\n    for ",
    "class Stack:\n    def __init__(self):\n        ",
    "def fibonacci(n):\n    if n < 2:\n        ",
    "try:\n    import json\nexcept ",
    "for line in open(path):\n    print(",
)
START_TIMEOUT, REQUEST_TIMEOUT = 300.0, 600.0  # seconds


class Load:
    """What clients have seen of a server."""

    def __init__(self, args: argparse.Namespace, url: str, model: str):
        import openai  # of the extra `clients`

        self.args, self.url, self.model = args, url, model
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=REQUEST_TIMEOUT, max_retries=0)
        self.alone: dict[str, str] = {}
        self.forget()

    def forget(self) -> None:
        self.first, self.between, self.tokens = [], [], 0
        self.counts = dict.fromkeys(("answered", "left", "refused", "other text", "failed"), 0)

    async def ask(self, prompt: str, leaves_after: int | None = None) -> str:
        """Streams an answer, and returns its text. Closes the stream after so many pieces, if a number is given."""
        begun, text, last = time.perf_counter(), "", None
        stream = await self.client.completions.create(
            model=self.model, prompt=prompt, max_tokens=self.args.tokens, temperature=0, stream=True
        )
        pieces = 0
        async for chunk in stream:
            now = time.perf_counter()
            if chunk.choices and chunk.choices[0].text:
                (self.between if last else self.first).append(now - (last or begun))
                text, last, pieces = text + chunk.choices[0].text, now, pieces + 1
            if pieces == leaves_after:
                await stream.close()
                break
        self.tokens += pieces
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
            "next token, s": in_words(self.between),
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


def serve(args: argparse.Namespace) -> tuple[subprocess.Popen, str, str]:
    """Starts `hf-ssd serve`. Returns its process, its address and the model's name."""
    command = [sys.executable, "-m", "hf_ssd", "serve", args.target, "--port", "0", *args.serve]
    command += ["--draft", args.draft] if args.draft else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + START_TIMEOUT
    for line in process.stdout:
        if found := re.search(r"http://\S+", line):
            url = found[0]
        if "shows a page" in line:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=REQUEST_TIMEOUT) as answer:
                return process, url, json.load(answer)["data"][0]["id"]
        if time.monotonic() > deadline:
            break
    process.kill()
    raise SystemExit("The server has not started.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", help="the target that `hf-ssd serve` loads")
    parser.add_argument("--draft", help="its draft")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="further options of `hf-ssd serve`, last")
    parser.add_argument("--url", help="a server that runs, instead")
    parser.add_argument("--model", help="the model's name there")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--seconds", type=float, default=120.0, help="for each number of clients")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--leave", type=float, default=0.1, help="share of requests whose client leaves")
    parser.add_argument("--bad", type=float, default=0.05, help="share of bodies that are no request")
    parser.add_argument("--kill-draft-every", type=float, default=0.0, metavar="SECONDS")
    args = parser.parse_args()
    if not args.url and not args.target:
        parser.error("name a target to serve, or the --url of a server")
    process, url, model = (None, args.url, args.model) if args.url else serve(args)
    load, rows = Load(args, url, model), []

    async def everything() -> None:
        await load.learn()
        for clients in tqdm(args.clients, desc="numbers of clients"):
            before = memory_of(process.pid) if process else 0
            row = await load.run(clients, lambda: kill_drafts(process.pid))
            row["memory, MB"] = f"{(memory_of(process.pid) - before) / 1024:+.0f}" if process else "-"
            rows.append(row)

    try:
        asyncio.run(everything())
    finally:
        if process is not None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
    print("| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(row.values()) + " |")
    if any(int(row[name]) for row in rows for name in ("other text", "failed")):
        raise SystemExit("Some answers were lost or had another text.")


if __name__ == "__main__":
    main()
