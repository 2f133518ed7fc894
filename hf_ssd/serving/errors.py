"""Error responses in the form that OpenAI's clients read."""

import http
from typing import Any

from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from transformers.cli.serving.utils import _GenerationCancelled


class Refusal(Exception):
    """Raised for a request that is not served, with a sentence for the client and the parameter at fault, if any."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, headers: dict | None = None):
        super().__init__(message)
        self.param, self.status, self.headers = param, status, headers


# Other exceptions are faults of the server: starlette answers them with status 500, and logs them.
OF_THE_CLIENT = (Refusal, ValueError, TypeError, TemplateError, HTTPException, _GenerationCancelled, ClientDisconnect)


def described(error: BaseException) -> tuple[int, dict]:
    """Returns the status and the body of the response to an error."""
    message, param = str(error), getattr(error, "param", None)
    if isinstance(error, HTTPException):
        status = error.status_code
        message = str(error.detail)
        if message == http.HTTPStatus(status).phrase:
            message = f"{message}: this server has no such address, or not with this method."
    else:
        status = getattr(error, "status", 400) if isinstance(error, OF_THE_CLIENT) else 500
    message = (message or type(error).__name__).encode(errors="replace").decode()
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return status, {"error": {"message": message, "type": kind, "param": param, "code": None}}


async def refuse(request, error: Exception) -> JSONResponse:
    """Answers a request with an error. A handler of exceptions for starlette."""
    status, body = described(error)
    # uvicorn closes the connection after an error that it logs; without this header a client would use it again.
    headers = {"connection": "close"} if status == 500 else getattr(error, "headers", None)
    return JSONResponse(body, status, headers)


def read(kind: type[BaseModel], body: bytes) -> Any:
    """Returns the request that a body holds. Raises [`Refusal`] about the first parameter that is at fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False, include_context=False)
    if not errors[0]["loc"]:
        raise Refusal(f"The body cannot be read: {errors[0]['msg']}.")
    name = str(errors[0]["loc"][0])
    # A value of several possible types has an error for each type; the longest location belongs to the intended type.
    found = max((one for one in errors if one["loc"][0] == errors[0]["loc"][0]), key=lambda one: len(one["loc"]))
    if name not in kind.model_fields:
        raise Refusal(f"Unknown parameter: `{name}`. Settings of transformers can stand in `generation_config`.", name)
    place = [str(part) for part in found["loc"] if not isinstance(part, str) or part.isidentifier()]
    place = ".".join(part for part in place if part not in ("str", "dict"))
    raise Refusal(f"`{place}`: {found['msg'].removeprefix('Value error, ')}.", name)
