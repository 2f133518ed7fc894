"""The server: transformers' own, whose model speculates, and a few addresses in front of it."""

import contextlib
import importlib.resources
import signal
from collections.abc import AsyncIterator

from fastapi import FastAPI, HTTPException, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from transformers.cli.serve import Serve
from transformers.utils import logging

import hf_ssd

from .calls import TurnTaking
from .live import Live, LiveRequest
from .metrics import Metrics

GRACE = 3  # seconds that answers which are under way get to end when the server is to


class Server(Serve):
    """
    `transformers serve` with one model and a draft. [`Server.run`] serves until it is interrupted.

    Args:
        target (`str`): Hub id or folder of the model.
        assistant ([`~hf_ssd.DraftAssistant`]): Its draft.
        ssd_config ([`~hf_ssd.SSDConfig`], *optional*): Settings of all calls.
        options: As `transformers serve` takes them, for example `device`, `dtype`, `host` and `port`.
    """

    def __init__(self, target: str, assistant: hf_ssd.DraftAssistant, ssd_config=None, **options):
        self.target, self.assistant, self.ssd_config = target, assistant, ssd_config
        super().__init__(force_model=target, non_blocking=True, **options)

    def start_server(self) -> None:
        """Called when transformers has built its server: gives the model its draft, and the server our addresses."""
        ((_, loaded),) = self._model_manager.loaded_models.items()
        model = hf_ssd.enable(loaded.model, assistant_model=self.assistant, ssd_config=self.ssd_config)
        metrics = Metrics(self.assistant)
        calls = TurnTaking(metrics.totals)
        self._generation_state.get_manager = lambda *args, **kwargs: calls
        self.server.config.timeout_graceful_shutdown = GRACE
        self.server.config.access_log = logging.get_verbosity() <= logging.INFO
        theirs = self.server.config.app
        live = Live(model, loaded.processor, calls)
        self.server.config.app = application(theirs, self.target, self.assistant, metrics, live, calls)

    def run(self) -> None:
        """Serves until an interrupt or SIGTERM."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn sends the signal again after its own shutdown
            self.server.run()


async def refuse(request, error: Exception) -> JSONResponse:
    """Answers a request that cannot be served with one sentence, in the form that OpenAI's clients read."""
    status, message = 400, str(error)
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    elif isinstance(error, RequestValidationError):
        status, first = 422, error.errors()[0]
        message = f"{' '.join(map(str, first['loc']))}: {first['msg']}"
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "code": None}}, status)


def application(theirs: FastAPI, target: str, assistant, metrics: Metrics, live: Live, calls: TurnTaking) -> FastAPI:
    """Returns our addresses, with transformers' server behind them."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await calls.end()

    app = FastAPI(title="hf_ssd", version=hf_ssd.__version__, lifespan=lifespan)

    @app.get("/", response_class=HTMLResponse)
    def page() -> str:
        return importlib.resources.files(__package__).joinpath("page.html").read_text()

    @app.post("/live")
    async def watch(request: LiveRequest) -> StreamingResponse:
        return StreamingResponse(live.events(request), media_type="text/event-stream")

    @app.get("/metrics")
    def figures() -> Response:
        return Response(metrics.as_text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/health")
    def health() -> dict:
        return {"status": "ok", "draft": assistant.state}

    @app.get("/v1/models")
    def models() -> dict:
        return {"object": "list", "data": [{"id": target, "object": "model", "created": 0, "owned_by": "hf_ssd"}]}

    @app.post("/load_model")
    @app.post("/reset")
    def pinned() -> None:  # another model, or this one loaded again, would have no draft
        raise HTTPException(403, f"This server has one model, {target}.")

    app.mount("/", theirs)
    for one in (app, theirs):
        for kind in (ValueError, HTTPException, RequestValidationError):
            one.add_exception_handler(kind, refuse)
    return app
