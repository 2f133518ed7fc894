"""The server: transformers' own with a model that speculates, and a few addresses more."""

import asyncio
import contextlib
import importlib.resources
import ipaddress
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import from_json
from starlette.middleware.cors import CORSMiddleware
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import BaseHandler
from transformers.utils import logging

import hf_ssd

from .calls import END_TIMEOUT, TurnTaking
from .errors import OF_THE_CLIENT, read, refuse
from .gate import Gate
from .live import Live, LiveRequest
from .metrics import Metrics
from .parameters import ChatRequest, CompletionRequest, ResponseRequest
from .requests import Endpoint, Limits

GRACE = 3  # seconds that running answers get to end when the server shuts down


class Server(Serve):
    """
    `transformers serve` with one model and a draft. [`Server.run`] serves until it is interrupted.

    Args:
        target (`str`): Hub id or folder of the model.
        assistant ([`~hf_ssd.DraftAssistant`]): The draft.
        ssd_config ([`~hf_ssd.SSDConfig`], *optional*): Settings of all calls.
        allowed_hosts (`list[str]`, *optional*): Names by which clients may call the server, beside `host`. By default
            the names of this machine if the server listens on a loopback address, and otherwise any name.
        served_model_name (`str`, *optional*): Name by which clients know the model; by default `target`.
        on_listening (`Callable`, *optional*): Called when the server listens.
        enable_cors (`bool`, *optional*, defaults to `False`): Whether pages of other sites may use the server.
        assistant_tokenizer (`PreTrainedTokenizerBase`, *optional*): The draft's tokenizer, if it differs from the
            target's.
        options: Options of `transformers serve`, for example `device`, `dtype`, `host` and `port`.
    """

    def __init__(
        self,
        target: str,
        assistant: hf_ssd.DraftAssistant,
        ssd_config=None,
        allowed_hosts=(),
        enable_cors=False,
        assistant_tokenizer=None,
        served_model_name: str | None = None,
        on_listening: Callable[[], None] = lambda: None,
        **options,
    ):
        self.target, self.assistant, self.ssd_config = target, assistant, ssd_config
        self.allowed_hosts, self.enable_cors = allowed_hosts, enable_cors
        self.assistant_tokenizer = assistant_tokenizer
        self.name, self.on_listening = served_model_name or target, on_listening
        super().__init__(force_model=target, non_blocking=True, **options)

    def start_server(self) -> None:
        """Called when transformers has built its server. Gives the model its draft, and the server our addresses."""
        ((_, loaded),) = self._model_manager.loaded_models.items()
        tokenizers = {}
        if self.assistant_tokenizer is not None:
            tokenizer = getattr(loaded.processor, "tokenizer", loaded.processor)
            tokenizers = {"tokenizer": tokenizer, "assistant_tokenizer": self.assistant_tokenizer}
        model = hf_ssd.enable(loaded.model, self.assistant, self.ssd_config, **tokenizers)
        metrics = Metrics(self.assistant)
        calls = TurnTaking(metrics.totals)
        self._generation_state.get_manager = lambda *args, **kwargs: calls
        names = [self.name, self.target, f"{self.target}@main"]
        limits, preparing = Limits(model, loaded.processor, names), ThreadPoolExecutor(1, "hf_ssd prepares")
        app = application(names, self.assistant, metrics, Live(model, loaded.processor, calls), calls)
        for path, handler, kind in [
            ("/v1/chat/completions", self._chat_handler, ChatRequest),
            ("/v1/completions", self._completion_handler, CompletionRequest),
            ("/v1/responses", self._response_handler, ResponseRequest),
        ]:
            handler._resolve_model = lambda body: (self.name, model, loaded.processor)
            app.add_route(path, Endpoint(handler, kind, limits, preparing), ["POST"])
        if decisions := getattr(self, "_systemone_handler", None):  # only in newer versions of transformers
            app.add_route("/v1/systemone", deciding(decisions), ["POST"])
        for kind in (*OF_THE_CLIENT, Exception):
            app.add_exception_handler(kind, refuse)
        config = self.server.config
        app.add_middleware(Gate, hosts(config.host, self.allowed_hosts), origins=self.enable_cors)
        if self.enable_cors:
            app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
        level, patience = logging.get_verbosity(), GRACE + int(END_TIMEOUT)
        options = {"log_level": level, "access_log": level <= logging.INFO, "timeout_graceful_shutdown": patience}
        self.server = Uvicorn(uvicorn.Config(app, config.host, config.port, **options), calls, self.on_listening)

    def run(self) -> None:
        """Serves until an interrupt or SIGTERM."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn sends the signal again after its own shutdown
            self.server.run()


class Uvicorn(uvicorn.Server):
    """Calls `on_listening` when it listens. At shutdown, ends the calls that still run after `GRACE` seconds."""

    def __init__(self, config: uvicorn.Config, calls: TurnTaking, on_listening: Callable[[], None]):
        super().__init__(config)
        self.calls, self.on_listening = calls, on_listening

    async def startup(self, *args, **kwargs) -> None:
        await super().startup(*args, **kwargs)
        if self.started:
            self.on_listening()

    async def shutdown(self, *args, **kwargs) -> None:
        asyncio.get_running_loop().call_later(GRACE, setattr, self.calls, "are_over", True)
        await super().shutdown(*args, **kwargs)


def hosts(host: str, allowed: Sequence[str]) -> list[str]:
    """Returns patterns of the names by which a server that listens on `host` may be called."""
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        is_loopback = False
    return ["localhost", "127.0.0.1", "::1", host, *allowed] if allowed or is_loopback else ["*"]


def deciding(handler: BaseHandler) -> Callable:
    """Returns the address of transformers' handler of decisions, which generates no text."""

    async def decide(request: Request) -> Response:
        return await handler.handle_request(from_json(await request.body()), str(uuid.uuid4()))

    return decide


def application(names: list[str], assistant, metrics: Metrics, live: Live, calls: TurnTaking) -> FastAPI:
    """Returns an application with all addresses that need no handler of transformers."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await calls.end()

    name = names[0]
    entry = {"id": name, "object": "model", "created": 0, "owned_by": "hf_ssd"}
    app = FastAPI(title="hf_ssd", version=hf_ssd.__version__, lifespan=lifespan)

    @app.get("/", response_class=HTMLResponse)
    def page() -> str:
        return importlib.resources.files(__package__).joinpath("page.html").read_text()

    @app.post("/live")
    async def watch(request: Request) -> StreamingResponse:
        events = live.events(read(LiveRequest, await request.body()))
        return StreamingResponse(events, media_type="text/event-stream")

    @app.get("/metrics")
    def figures() -> Response:
        return Response(metrics.as_text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/health")
    def health() -> dict:
        return {"status": "ok", "draft": assistant.state}

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
