"""An OpenAI endpoint whose model speculates, with figures at /metrics and a page at /.

example:
  hf-ssd serve Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --draft-device cuda:1

It is `transformers serve` with one model and a draft: chat completions, completions, responses, streaming and tool
calls work as there. Requests join a running batch of up to --max-rows answers. The server accepts connections from this
machine only, unless --host says otherwise.
"""

import argparse
import functools
import importlib.util
import os
import socket
from pathlib import Path

import hf_ssd

from . import doctor, models
from .options import at_least

OF_THE_SERVER = "host api_key max_tokens max_rows max_waiting allowed_hosts log_level keep_prefixes".split()
NEEDED = ("fastapi", "uvicorn", "openai", "prometheus_client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--served-model-name", metavar="NAME", help="default: hub id, or name of the folder or file")
    server.add_argument("--api-key", metavar="KEY", help="that clients must send; default: none")
    server.add_argument("--max-tokens", type=at_least(1), metavar="N", help="most tokens of an answer")
    server.add_argument("--max-rows", type=at_least(1), default=8, metavar="N", help="answers at a time; default: 8")
    server.add_argument("--max-waiting", type=at_least(0), metavar="N", help="requests that wait; default: any number")
    kept = "memory for texts that the next turn of a chat need not read again; default: 1/8 of the free memory"
    server.add_argument("--keep-prefixes", type=gibibytes, default="auto", metavar="GIB", help=kept)
    server.add_argument("--host", default="127.0.0.1", help="address to listen on; default: this machine alone")
    server.add_argument("--port", type=int, default=8000, help="8000; 0: any that is free")
    server.add_argument("--cors", action="store_true", help="allow cross-origin requests")
    server.add_argument("--allowed-hosts", nargs="+", default=(), metavar="NAME", help="names that clients call it by")
    server.add_argument("--log-level", default="error", choices=("error", "warning", "info", "debug"))


def gibibytes(text: str) -> int | str:
    """An argparse type for an amount of memory in bytes, or "auto"."""
    return text if text == "auto" else int(at_least(0, float)(text) * 2**30)


def run(args: argparse.Namespace) -> int:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f'serving needs {", ".join(missing)}: pip install "hf_ssd[serve]"')
    port, say = free_port(args.host, args.port), functools.partial(print, flush=True)
    found = models.chosen(args)
    say(doctor.in_words(doctor.examine(found)))
    address = f"http://{args.host}:{port} shows a page, and serves OpenAI's clients under /v1"
    from ..serving.server import Server  # needs the packages that were looked for above

    model, processor = found.target.load_for_requests()
    with found.launch_draft(model) as assistant:
        hf_ssd.enable(model, assistant, found.config, **found.tokenizers)
        public = public_name(found.target)
        names = [args.served_model_name or public, public, found.target.name]
        options = {name: getattr(args, name) for name in OF_THE_SERVER} | {"port": port, "enable_cors": args.cors}
        options |= {"on_listening": lambda: say(address), "on_request": say}
        server = Server(model, processor, assistant, names, **options)
        if server.why_in_turn:
            say(f"One request at a time: {server.why_in_turn}")
        say("warming up ...")
        server.run()
    say("The server has ended.")
    return 0


def public_name(model: models.Model) -> str:
    """Returns a name that tells clients nothing about the server's disk: a hub id, or the name of a folder or file."""
    if file := model.files.get("gguf_file"):
        return Path(file).stem
    return Path(model.name).resolve().name if os.path.exists(model.name) else model.name


def free_port(host: str, port: int) -> int:
    """Returns the port, or a free port if it is 0, or raises `ValueError` if the server cannot listen there."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return probe.getsockname()[1]
    except (OSError, OverflowError) as error:
        raise ValueError(f"Cannot listen on {host} port {port}: {error}. Choose another --host or --port.") from error
