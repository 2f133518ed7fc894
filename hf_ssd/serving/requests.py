"""Serves requests of OpenAI's clients: reads and tokenizes them in a thread, and watches whether the client leaves."""

import asyncio
import contextvars
import inspect
import json
import logging
import uuid
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Executor
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from transformers import PreTrainedModel
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import X_REQUEST_ID, BaseHandler, Modality

from .calls import CALL, Call
from .errors import Refusal, described, read
from .parameters import Parameters
from .stops import StreamCut, cut_answer

POLL = 0.1  # polling interval in seconds, to notice that a client has left
logger = logging.getLogger(__name__)


class Limits:
    """Limits of requests: the names of the model, the length of a prompt, and the types of its parts."""

    def __init__(self, model: PreTrainedModel, processor, names: list[str]):
        self.names = names
        positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        longest = max(map(len, getattr(processor, "tokenizer", processor).get_vocab()))
        self.positions, self.characters = positions, None if positions is None else positions * longest
        self.reads_text_only = ModelManager.get_model_modality(model, processor=processor) == Modality.LLM
        # Clients may not set the method's own arguments: a `chat_template`, for example, would be a program of theirs.
        self.reserved = {*inspect.signature(processor.apply_chat_template).parameters} - {"documents"}

    def check(self, request: Parameters) -> None:
        """Raises [`Refusal`] if it is clear before tokenization that the request cannot be served."""
        if request.model not in (None, *self.names):
            raise Refusal(f"This server has one model, {self.names[0]}; the request names {request.model}.", "model")
        if self.characters is not None and (count := request.characters()) > self.characters:
            raise Refusal(
                f"The prompt has {count} characters; the model's {self.positions} positions hold at most "
                f"{self.characters}.",
                status=413,
            )
        if self.reads_text_only and (kinds := request.media()):
            raise Refusal(f"The model reads text only; the messages have {', '.join(sorted(kinds))}.", "messages")
        if names := self.reserved.intersection(getattr(request, "chat_template_kwargs", None) or ()):
            raise Refusal(f"`chat_template_kwargs` may not name {', '.join(sorted(names))}.", "chat_template_kwargs")


class Endpoint:
    """An OpenAI address as an ASGI application, which reads and tokenizes in the thread of `preparing`."""

    def __init__(self, handler: BaseHandler, kind: type[BaseModel], limits: Limits, preparing: Executor):
        self.handler, self.kind, self.limits, self.preparing = handler, kind, limits, preparing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, call = Request(scope, receive), Call(asyncio.get_running_loop())
        CALL.set(call)
        try:
            response = await self._answer(request, call)
            await response(scope, receive, send)
        finally:
            call.has_left.set()  # a running call ends with its next round

    async def _answer(self, request: Request, call: Call) -> Response:
        """Returns the response when it is complete or its stream begins. Meanwhile watches for the client to leave."""
        name = request.headers.get(X_REQUEST_ID) or str(uuid.uuid4())
        handling = self._handle(await request.body(), name, call)
        task = asyncio.create_task(begun_in(self.preparing, handling))
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=POLL)
                if await request.is_disconnected():
                    call.has_left.set()
        finally:
            task.cancel()  # does nothing to a task that is done
        response = task.result()
        if isinstance(response, StreamingResponse):
            response.body_iterator = corrected(response.body_iterator, call)
        elif call.stop:
            response = JSONResponse(cut_answer(json.loads(response.body), call.stop))
        response.headers[X_REQUEST_ID] = name
        return response

    async def _handle(self, body: bytes, name: str, call: Call) -> Response:
        request = read(self.kind, body)
        self.limits.check(request)
        call.seed, call.settings, call.stop = request.seed, request.settings(), request.stops()
        try:
            return await self.handler.handle_request({**request.body(), "model": self.limits.names[0]}, name)
        except (KeyError, IndexError, AttributeError) as error:
            if call.is_prepared:
                raise
            raise Refusal(f"The request cannot be read: {error!r}.") from error


async def corrected(chunks: AsyncIterator, call: Call) -> AsyncIterator:
    """Yields a stream's chunks without stop strings. transformers' text of an error becomes OpenAI's error object."""
    cut = StreamCut(call.stop)
    async for chunk in chunks:
        if call.error is not None:
            status, body = described(call.error)
            if status == 500:
                logger.error("A call failed.", exc_info=call.error)
            chunk = chunk.replace(f'data: {{"error": "{call.error}"}}\n\n', f"data: {json.dumps(body)}\n\n")
        yield cut.events(chunk) if call.stop else chunk


async def begun_in(thread: Executor, coroutine: Coroutine) -> Any:
    """Runs a coroutine in another thread until it first waits, and then in the event loop. Returns its result."""
    context = contextvars.copy_context()
    has_ended, result = await asyncio.get_running_loop().run_in_executor(thread, context.run, _begin, coroutine)
    return result if has_ended else await asyncio.create_task(coroutine)


def _begin(coroutine: Coroutine) -> tuple[bool, Any]:
    try:
        coroutine.send(None)
    except StopIteration as end:
        return True, end.value
    return False, None
