"""What is looked at before a request is read: whose page sent it, and how large it is."""

from urllib.parse import urlsplit

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import refuse

BODY_LIMIT = 16 << 20  # bytes


class Gate:
    """
    Refuses what a page of another site sends, and bodies above the limit, while they arrive.

    A browser lets any page send a request here, even if it does not let the page read the answer.

    Args:
        app (`ASGIApp`): What is behind.
        origins (`bool`): Whether pages of other sites may send requests.
    """

    def __init__(self, app: ASGIApp, origins: bool = False):
        self.app, self.origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers, size = Headers(scope=scope), 0
        too_large = HTTPException(413, f"The body is larger than {BODY_LIMIT >> 20} MiB.")
        if int(headers.get("content-length", 0)) > BODY_LIMIT:
            return await (await refuse(scope, too_large))(scope, receive, send)
        origin = headers.get("origin")
        if scope["method"] == "POST" and origin is not None and not self.origins:
            if urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
                error = HTTPException(403, f"A page of {origin} may not use this server, unless it has --cors.")
                return await (await refuse(scope, error))(scope, receive, send)

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > BODY_LIMIT:
                raise too_large
            return message

        await self.app(scope, counted, send)
