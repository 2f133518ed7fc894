"""The server: transformers' own, whose model speculates, and a few addresses in front of it."""

import asyncio
import contextlib
import importlib.resources
import ipaddress
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from transformers.cli.serve import Serve
from transformers.utils import logging

import hf_ssd

from .calls import END_TIMEOUT, TurnTaking
from .errors import OF_THE_CLIENT, Refusal, read, refuse
from .gate import Gate
from .live import Live, LiveRequest
from .metrics import Metrics
from .parameters import ChatRequest, CompletionRequest, ResponseRequest
from .requests import Endpoint, Limits

GRACE = 3  # seconds that answers which are under way get to end when the server is to


class Server(Serve):
    """
    `transformers serve` with one model and a draft. [`Server.run`] serves until it is interrupted.

    Args:
        target (`str`): Hub id or folder of the model.
        assistant ([`~hf_ssd.DraftAssistant`]): Its draft.
        ssd_config ([`~hf_ssd.SSDConfig`], *optional*): Settings of all calls.
        allowed_hosts (`list[str]`, *optional*): Names by which clients may call it, beside `host`. By default those of
            this machine if it listens on a loopback address, and otherwise any.
        served_model_name (`str`, *optional*): By which clients know the model; by default `target`.
        on_listening (`Callable`, *optional*): Called when the server listens.
        enable_cors (`bool`, *optional*, defaults to `False`): Whether pages of other sites may use it.
        assistant_tokenizer (`PreTrainedTokenizerBase`, *optional*): The draft's, if it differs from the target's.
        options: As `transformers serve` takes them, for example `device`, `dtype`, `host` and `port`.
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
        """Called when transformers has built its server: gives the model its draft, and the server our addresses."""
        ((_, loaded),) = self._model_manager.loaded_models.items()
        model = hf_ssd.enable(loaded.model, self.assistant, self.ssd_config, **self._tokenizers(loaded.processor))
        metrics = Metrics(self.assistant)
        calls = TurnTaking(metrics.totals)
        self._generation_state.get_manager = lambda *args, **kwargs: calls
        self.server.config.timeout_graceful_shutdown = GRACE + int(END_TIMEOUT)
        self.server.shutdown = ending(self.server.shutdown, calls)
        self.server.config.log_level = logging.get_verbosity()
        self.server.config.access_log = logging.get_verbosity() <= logging.INFO
        self.server.config.configure_logging()
        self.server.startup = self._started(self.server.startup)
        names = {self.name, self.target, f"{self.target}@main"}
        limits, preparing = Limits(model, loaded.processor), ThreadPoolExecutor(1, "hf_ssd prepares")
        app = application(self.name, names, self.assistant, metrics, Live(model, loaded.processor, calls), calls)
        for path, handler, kind in [
            ("/v1/chat/completions", self._chat_handler, ChatRequest),
            ("/v1/completions", self._completion_handler, CompletionRequest),
            ("/v1/responses", self._response_handler, ResponseRequest),
        ]:
            handler._resolve_model = resolving(handler._resolve_model, self.name, names)
            app.add_route(path, Endpoint(handler, kind, limits, preparing), ["POST"])
        theirs = self.server.config.app
        app.mount("/", theirs)
        for one in (app, theirs):
            for kind in (*OF_THE_CLIENT, Exception):
                one.add_exception_handler(kind, refuse)
        app.add_middleware(Gate, hosts(self.server.config.host, self.allowed_hosts), origins=self.enable_cors)
        if self.enable_cors:
            app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
        self.server.config.app = app

    def _tokenizers(self, processor) -> dict:
        """Returns the tokenizers of both models if they differ."""
        if self.assistant_tokenizer is None:
            return {}
        tokenizer = getattr(processor, "tokenizer", processor)
        return {"tokenizer": tokenizer, "assistant_tokenizer": self.assistant_tokenizer}

    def _started(self, startup: Callable) -> Callable:
        async def started(*args, **kwargs) -> None:
            await startup(*args, **kwargs)
            if self.server.started:
                self.on_listening()

        return started

    def run(self) -> None:
        """Serves until an interrupt or SIGTERM."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn sends the signal again after its own shutdown
            self.server.run()


def hosts(host: str, allowed: Sequence[str]) -> list[str]:
    """Returns patterns of the names by which a server that listens on `host` may be called."""
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        is_loopback = False
    return ["localhost", "127.0.0.1", "::1", host, *allowed] if allowed or is_loopback else ["*"]


def ending(shutdown: Callable, calls: TurnTaking) -> Callable:
    """Returns uvicorn's method that waits for answers; it ends their calls first: an answer that it cuts is logged."""

    async def ended(*args, **kwargs) -> None:
        asyncio.get_running_loop().call_later(GRACE, setattr, calls, "are_over", True)
        await shutdown(*args, **kwargs)

    return ended


def resolving(resolve: Callable, name: str, names: set[str]) -> Callable:
    """Returns transformers' method that finds a request's model, which here has several names and answers with one."""

    def resolved(body: dict) -> tuple:
        if (asked := body.pop("model", None)) not in (None, *names):
            raise Refusal(f"This server has one model, {name}; the request names {asked}.", "model")
        _, model, processor = resolve(body)
        return name, model, processor

    return resolved


def application(name: str, names: set[str], assistant, metrics: Metrics, live: Live, calls: TurnTaking) -> FastAPI:
    """Returns the addresses that `transformers serve` does not have."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await calls.end()

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
    def pinned() -> None:  # another model, or this one loaded again, would have no draft
        raise HTTPException(403, f"This server has one model, {name}.")

    return app
