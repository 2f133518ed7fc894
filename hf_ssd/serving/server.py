"""The server: transformers' own with a model that speculates, and a few addresses more."""

import asyncio
import contextlib
import functools
import importlib.resources
import ipaddress
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.middleware.cors import CORSMiddleware
from transformers import PreTrainedModel
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import _GenerationCancelled
from transformers.utils import logging

import hf_ssd

from .calls import END_TIMEOUT, POLL, Call, CallRunner
from .errors import OF_THE_CLIENT, read, refuse
from .gate import Gate
from .limits import Limits
from .live import LiveRequest, events
from .metrics import Metrics
from .parameters import ChatRequest, CompletionRequest, DecisionRequest, ResponseRequest
from .request_log import RequestLog
from .requests import Endpoint

GRACE = 3  # seconds that running answers get to end when the server shuts down
PATIENCE = 60.0  # seconds for the draft's worker to start
WARM_UP = {"do_sample": False, "max_time": 20.0}  # seconds, in which a slow model answers with fewer tokens
WARM_UP_TOKENS = 24  # enough for the planner to have measured both models
WARM_UP_PROMPT = "The quick brown fox jumps over the lazy dog."


class Server(Serve):
    """`transformers serve`, with its options, for one model, which was enabled with its draft."""

    def __init__(
        self,
        model: PreTrainedModel,
        processor,
        assistant: hf_ssd.DraftAssistant | None,
        names: list[str],  # by which clients may call the model; answers have the first name
        api_key: str | None = None,  # that clients must send
        max_tokens: int | None = None,  # of an answer
        max_rows: int = 8,  # answers at a time
        max_waiting: int | None = None,  # requests that may wait
        keep_prefixes: int | str = "auto",  # as in `hf_ssd.continuous_batching`
        allowed_hosts: Sequence[str] = (),  # names of the server beside `host`
        enable_cors: bool = False,  # whether pages of other sites may use the server
        on_listening: Callable[[], None] = lambda: None,
        on_request: Callable[[str], None] = lambda line: None,  # gets a line about each request that has ended
        **options,
    ):
        super().__init__(device=str(model.device), non_blocking=True, **options)  # `start_server` starts nothing here
        self.why_in_turn, batch = "", None  # why requests are answered one at a time
        try:
            room = {"max_rows": max_rows, "max_waiting": max_waiting}
            batch = hf_ssd.continuous_batching(model, keep_prefixes=keep_prefixes, **room)
        except ValueError as error:
            self.why_in_turn = str(error)
        metrics, config = Metrics(assistant, batch), self.server.config
        calls = CallRunner(Limits(model, processor, names), metrics.totals, max_tokens, batch)
        self._generation_state.get_manager = lambda *args, **kwargs: calls
        app, preparing = application(assistant, metrics, calls), ThreadPoolExecutor(1, "hf_ssd prepares")
        for path, handler, kind in [
            ("/v1/chat/completions", self._chat_handler, ChatRequest),
            ("/v1/completions", self._completion_handler, CompletionRequest),
            ("/v1/responses", self._response_handler, ResponseRequest),
            ("/v1/systemone", getattr(self, "_systemone_handler", None), DecisionRequest),  # only in newer versions
        ]:
            if handler is not None:
                handler._resolve_model = lambda body: (names[0], model, processor)
                app.add_route(path, Endpoint(handler, kind, calls, preparing), ["POST"])
        for kind in (*OF_THE_CLIENT, Exception):
            app.add_exception_handler(kind, refuse)
        app.add_middleware(Gate, hosts(config.host, allowed_hosts), enable_cors, api_key)
        app.add_middleware(RequestLog, on_request)
        if enable_cors:
            app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
        level, patience = logging.get_verbosity(), GRACE + END_TIMEOUT
        options = {"log_level": level, "access_log": False, "timeout_graceful_shutdown": patience}
        warming = functools.partial(warm_up, calls, assistant)
        self.server = Uvicorn(uvicorn.Config(app, config.host, config.port, **options), calls, warming, on_listening)

    def start_server(self) -> None:
        """Does nothing: transformers' server, for which this is called, is replaced."""

    def run(self) -> None:
        """Serves until an interrupt or SIGTERM."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn sends the signal again after its own shutdown
            self.server.run()


class Uvicorn(uvicorn.Server):
    """Warms up before it listens, and at shutdown ends the calls that still run after `GRACE` seconds."""

    def __init__(self, config: uvicorn.Config, calls: CallRunner, warming: Callable, on_listening: Callable):
        super().__init__(config)
        self.calls, self.warming, self.on_listening = calls, warming, on_listening

    async def startup(self, *args, **kwargs) -> None:
        call = Call(asyncio.get_running_loop())
        warming = asyncio.wrap_future(self.calls.submit(self.warming, call))
        while not warming.done():
            await asyncio.wait({warming}, timeout=POLL)
            if self.should_exit:
                call.has_left.set()
        with contextlib.suppress(_GenerationCancelled):
            warming.result()
        if self.should_exit:
            return
        await super().startup(*args, **kwargs)
        if self.started:
            self.on_listening()

    async def shutdown(self, *args, **kwargs) -> None:
        asyncio.get_running_loop().call_later(GRACE, self.calls.stop)
        await super().shutdown(*args, **kwargs)
        if not self.force_exit:
            await self.calls.end()


def warm_up(calls: CallRunner, assistant, call: Call) -> None:
    """Waits for the draft's worker and generates a few tokens, for which the first client would wait."""
    deadline = time.monotonic() + PATIENCE
    while getattr(assistant, "state", None) == "starting" and time.monotonic() < deadline:
        calls.check(call)
        time.sleep(POLL)
    model, positions = calls.limits.model, calls.limits.positions
    tokens = calls.limits.tokenizer(WARM_UP_PROMPT)["input_ids"][:8] or [0]
    ids = torch.tensor([tokens], device=model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    most = WARM_UP_TOKENS if positions is None else min(WARM_UP_TOKENS, positions - len(tokens))
    streamer = hf_ssd.BatchStreamer(lambda *_: calls.check(call))  # counts nothing
    model.generate(**inputs, max_new_tokens=most, streamer=streamer, **WARM_UP)


def hosts(host: str, allowed: Sequence[str]) -> list[str]:
    """Returns patterns of the names by which a server that listens on `host` may be called."""
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        is_loopback = False
    return ["localhost", "127.0.0.1", "::1", host, *allowed] if allowed or is_loopback else ["*"]


def application(assistant, metrics: Metrics, calls: CallRunner) -> FastAPI:
    """Returns an application with all addresses that need no handler of transformers."""
    names, tokenizer = calls.limits.names, calls.limits.tokenizer
    name = names[0]
    entry = {"id": name, "object": "model", "created": 0, "owned_by": "hf_ssd"}
    entry["has_chat_template"] = tokenizer.chat_template is not None  # for the page
    app = FastAPI(title="hf_ssd", version=hf_ssd.__version__)

    @app.get("/", response_class=HTMLResponse)
    def page() -> str:
        return importlib.resources.files(__package__).joinpath("page.html").read_text()

    @app.post("/live")
    async def watch(request: Request) -> StreamingResponse:
        asked = read(LiveRequest, await request.body())
        return StreamingResponse(events(asked, calls), media_type="text/event-stream")

    @app.get("/metrics")
    def figures() -> Response:
        return Response(generate_latest(metrics), media_type=CONTENT_TYPE_LATEST)

    @app.get("/health")
    def health() -> dict:
        return {"status": "ok", "draft": assistant.state if assistant else "none"}

    @app.get("/v1/models")
    def models() -> dict:
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{asked:path}")
    def model(asked: str) -> dict:
        if asked not in names:
            raise HTTPException(404, f"This server has one model, {name}.")
        return entry

    @app.post("/load_model")
    @app.post("/reset")
    @app.post("/v1/audio/transcriptions")
    def pinned() -> None:  # another model, or a model loaded again, would have no draft
        raise HTTPException(403, f"This server has one model, {name}.")

    return app
