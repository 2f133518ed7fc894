"""Serves requests of OpenAI's clients: reads and tokenizes them in a thread, and watches whether the client leaves."""

import asyncio
import contextvars
import json
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from transformers.cli.serving.utils import X_REQUEST_ID, BaseHandler

from .calls import CALL, POLL, Call, CallRunner
from .choices import ShownChoice, whole
from .errors import described, read
from .parameters import DecisionRequest
from .structured import grammar_for


class Endpoint:
    """An OpenAI address as an ASGI application, which reads and tokenizes in the thread of `preparing`."""

    def __init__(self, handler: BaseHandler, kind: type, calls: CallRunner, preparing: Executor):
        self.handler, self.kind, self.calls, self.preparing = handler, kind, calls, preparing
        self.limits = calls.limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, call = Request(scope, receive), CALL.get()
        call.name = request.headers.get(X_REQUEST_ID) or str(uuid.uuid4())
        await self._watching(request, self._in_thread(self._read, await request.body(), call), call)
        responses = await self._watching(request, self._handle(0, call), call)
        response = responses[0]
        if isinstance(response, StreamingResponse):
            events = self._events(responses, call)
            if call.parameters.stream:
                lines = ("".join(f"data: {json.dumps(event)}\n\n" for event in found) async for found in events)
                response = StreamingResponse(lines, media_type="text/event-stream")
            else:
                response = JSONResponse(await self._watching(request, joined(events, call), call))
        response.headers[X_REQUEST_ID] = call.name
        await response(scope, receive, send)

    async def _watching(self, request: Request, coroutine: Coroutine, call: Call) -> Any:
        """Runs a coroutine, and meanwhile watches for the client to leave."""
        task = asyncio.create_task(coroutine)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=POLL)
                if await request.is_disconnected():
                    call.has_left.set()
        finally:
            task.cancel()  # does nothing to a task that is done
        return task.result()

    async def _in_thread(self, function: Callable, *args) -> Any:
        run = contextvars.copy_context().run
        return await asyncio.get_running_loop().run_in_executor(self.preparing, run, function, *args)

    def _read(self, body: bytes, call: Call) -> None:
        """Reads and checks a request, and tokenizes its prompts if it is not a chat."""
        call.parameters = request = read(self.kind, body)
        self.limits.check(request)
        call.grammar = grammar_for(request, self.limits.model, self.limits.tokenizer)
        read_text = self.limits.tokenizer
        prompts = [read_text(one)["input_ids"] if isinstance(one, str) else one for one in request.prompts()]
        with self.calls.counting_refusals():
            for tokens in prompts:
                self.limits.check_prompt(tokens)
        if request.likely() is not None:
            self.limits.token_names.spelled  # noqa: B018  may take seconds the first time
        call.body, call.prompts = {**request.body(), "model": self.limits.names[0]}, prompts or [None]

    async def _handle(self, number: int, call: Call) -> list[Response]:
        """Returns the responses of transformers' handler for the choices of one prompt, which are streams."""
        call.begin(number)
        try:
            if self.kind is DecisionRequest:  # waits for the model
                return [await self.handler.handle_request(call.body, call.name)]
            return [
                await self._in_thread(asyncio.run, self.handler.handle_request(dict(call.body), call.name))
                for _ in range(call.parameters.get("n", 1))
            ]
        except Exception as error:
            raise call.blamed(error) from error

    async def _events(self, responses: list[StreamingResponse], call: Call) -> AsyncIterator[list[dict]]:
        """Yields the events of the responses, those of the first prompt, and then of the other prompts, for clients."""
        for number in range(len(call.prompts)):
            if number:
                responses = await self._handle(number, call)
            shown = [ShownChoice(call, number, index, self.limits.token_names) for index in range(len(responses))]
            async for index, chunk in merged([response.body_iterator for response in responses]):
                if call.error is not None:  # transformers' text of it becomes OpenAI's object
                    error = json.dumps(described(call.blamed(call.error))[1])
                    chunk = chunk.replace(f'{{"error": "{call.error}"}}', error)
                events = []
                for line in filter(None, chunk.split("\n\n")):
                    events += shown[index].events(json.loads(line.removeprefix("data: ")))
                yield events
                if any("error" in event for event in events):  # the other choices have the same
                    return
            if call.error is not None:
                return


async def joined(events: AsyncIterator[list[dict]], call: Call) -> dict:
    """Returns the answer that the events of a stream make, or raises the error that has ended them."""
    found = [event async for some in events for event in some]
    if call.error is not None:
        raise call.blamed(call.error)
    return whole(found)


async def merged(streams: list[AsyncIterator]) -> AsyncIterator[tuple[int, str]]:
    """Yields the chunks of several streams as they come, each after the number of its stream."""
    tasks = {asyncio.ensure_future(anext(stream, None)): index for index, stream in enumerate(streams)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=tasks.get):
                index, chunk = tasks.pop(task), task.result()
                if chunk is not None:
                    tasks[asyncio.ensure_future(anext(streams[index], None))] = index
                    yield index, chunk
    finally:
        for task in tasks:
            task.cancel()
