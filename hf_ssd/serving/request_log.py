"""Begins the call of each request, and shows a line when it ends: method, path, status, tokens, seconds, and speed."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .calls import CALL, Call

POLLED = ("/health", "/metrics")  # monitors ask these every few seconds


class RequestLog:
    """Middleware around everything else, so that requests that are refused have a line too."""

    def __init__(self, app: ASGIApp, show: Callable[[str], None]):
        self.app, self.show = app, show

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in POLLED:
            return await self.app(scope, receive, send)
        start, status, call = time.perf_counter(), 500, Call(asyncio.get_running_loop())
        CALL.set(call)

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            call.has_left.set()  # a running call ends with its next round
            line = f"{time.strftime('%H:%M:%S')} {scope['method']} {quote(scope['path'])} {status}"
            line += f": {call.tokens} tokens" if call.tokens else ""
            line += f" in {time.perf_counter() - start:.2f} s"
            line += f", {call.tokens / call.seconds:.1f} tokens/s" if call.tokens and call.seconds else ""
            with contextlib.suppress(OSError):  # nobody reads the output
                self.show(line)
