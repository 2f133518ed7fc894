"""An OpenAI endpoint whose model speculates, with figures at /metrics and a page at /.

example:
  hf-ssd serve Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --draft-device cuda:1

It is `transformers serve` with one model and a draft: chat completions, completions, responses, streaming and tool
calls work as there, and clients name the TARGET as their model. Requests take turns. The server accepts connections
from this machine only, unless --host says otherwise.
"""

import argparse
import importlib.util
import socket

import hf_ssd

from ..config import LONGEST_LOOKAHEAD
from . import doctor, models
from .options import at_least

NEEDED = ("fastapi", "uvicorn", "openai", "prometheus_client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_models(parser)
    server, lookahead = parser.add_argument_group("server"), at_least(1, below=LONGEST_LOOKAHEAD + 1)
    server.add_argument("--draft", dest="draft_named", metavar="DRAFT", help="another way to name the DRAFT")
    server.add_argument("--served-model-name", metavar="NAME", help="by which clients name it; default: TARGET")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on; default: this machine alone")
    server.add_argument("--port", type=int, default=8000, help="8000; 0: any that is free")
    server.add_argument("--cors", action="store_true", help="allow cross-origin requests")
    server.add_argument("--allowed-hosts", nargs="+", default=(), metavar="NAME", help="names that clients call it by")
    server.add_argument("--lookahead", type=lookahead, help="drafted tokens a round; default: planned")
    server.add_argument("--budget", type=at_least(1), help="outcomes to prepare; default: planned")
    server.add_argument("--log-level", default="error", choices=("error", "warning", "info", "debug"))


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f'serving needs {", ".join(missing)}: pip install "hf_ssd[serve]"')
    if args.draft_named and args.draft:
        raise ValueError("There are two drafts; name one, behind TARGET or with --draft.")
    args.draft = args.draft or args.draft_named
    port = free_port(args.host, args.port)
    found = models.chosen(args)
    config = hf_ssd.SSDConfig(lookahead=args.lookahead or "auto", budget=args.budget or "auto")
    print(doctor.in_words(doctor.examine(found)), flush=True)
    address = f"http://{args.host}:{port} shows a page, and serves OpenAI's clients under /v1"
    from ..serving.server import Server  # needs the packages that were looked for above

    with found.launch_draft() as assistant:
        server = Server(
            found.target,
            assistant,
            config,
            assistant_tokenizer=found.tokenizers.get("assistant_tokenizer"),
            device=str(found.device),
            dtype=str(found.dtype).removeprefix("torch."),
            host=args.host,
            port=port,
            enable_cors=args.cors,
            allowed_hosts=args.allowed_hosts,
            log_level=args.log_level,
            served_model_name=args.served_model_name,
            on_listening=lambda: print(address, flush=True),
        )
        server.run()
    print("The server has ended.", flush=True)
    return 0


def free_port(host: str, port: int) -> int:
    """
    Returns the port, or a free port if it is 0.

    Raises:
        `ValueError`: the server cannot listen on the port.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return probe.getsockname()[1]
    except (OSError, OverflowError) as error:
        raise ValueError(f"Cannot listen on {host} port {port}: {error}. Choose another --host or --port.") from error
