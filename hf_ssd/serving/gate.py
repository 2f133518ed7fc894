"""Checks a request before it is read: the server's name in it, its key, the page that sent it, and its size."""

import secrets
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import refuse

BODY_LIMIT = 16 << 20  # bytes
OPEN = ("/", "/health")  # need no key
TOO_LARGE = 413, f"The body is larger than {BODY_LIMIT >> 20} MiB."


class Gate:
    """Refuses a request with another name, without the key or by a foreign page, and a too large body as it arrives."""

    # A page can let its own host name point to this machine, and a browser lets any page send a request here, even if
    # the browser does not let the page read the answer.
    def __init__(self, app: ASGIApp, hosts: list[str], origins: bool, key: str | None):
        self.app, self.hosts, self.origins = app, [host.lower() for host in hosts], origins
        self.token = key and f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        error, size = self._refusal(scope["method"], scope["path"], Headers(scope=scope)), 0
        if error is not None:
            return await (await refuse(scope, error))(scope, receive, send)

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > BODY_LIMIT:
                raise HTTPException(*TOO_LARGE)
            return message

        await self.app(scope, counted, send)

    def _refusal(self, method: str, path: str, headers: Headers) -> HTTPException | None:
        """Returns the error of a request that is refused before its body is read."""
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        try:
            name, site = urlsplit(f"//{host}").hostname or "", urlsplit(origin or "").netloc.lower()
        except ValueError:  # brackets without an address
            name = site = ""
        if not any(fnmatchcase(name, pattern) for pattern in self.hosts):
            return HTTPException(400, f"This server is not called {host}; --allowed-hosts can name it.")
        if method == "POST" and not self.origins and origin is not None and site != host:
            return HTTPException(403, f"A page of {origin} may not use this server, unless it has --cors.")
        given = headers.get("authorization", "").encode("latin-1")
        if self.token and path not in OPEN and method != "OPTIONS" and not secrets.compare_digest(given, self.token):
            return HTTPException(401, "The request has not the key of this server, which --api-key has set.")
        if int(headers.get("content-length", 0)) > BODY_LIMIT:
            return HTTPException(*TOO_LARGE)
        return None
