"""Logs one line for each request: method, path, status, tokens, seconds, and tokens per second."""

import contextvars
import logging
import time
from dataclasses import dataclass
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLLED = ("/health", "/metrics")  # monitors ask these every few seconds
logger = logging.getLogger(__name__)


@dataclass
class Tally:
    """What a request has cost. The thread that generates writes it."""

    tokens: int = 0
    seconds: float = 0.0  # of generating, without waiting for a turn


TALLY: contextvars.ContextVar[Tally] = contextvars.ContextVar("tally")


class RequestLog:
    """Middleware around everything else, so that requests that are refused are logged too."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in POLLED:
            return await self.app(scope, receive, send)
        start, status, tally = time.perf_counter(), 500, Tally()
        TALLY.set(tally)

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            line = f"{scope['method']} {quote(scope['path'])} {status}"
            if tally.tokens:
                line += f": {tally.tokens} tokens in {time.perf_counter() - start:.2f} s"
                line += f", {tally.tokens / tally.seconds:.1f} tokens/s" if tally.seconds else ""
            else:
                line += f" in {time.perf_counter() - start:.2f} s"
            logger.info(line)
