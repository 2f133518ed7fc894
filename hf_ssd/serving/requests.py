"""Serves requests of OpenAI's clients: reads and tokenizes them in a thread, and watches whether the client leaves."""

import asyncio
import contextvars
import json
import logging
import uuid
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Executor
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from transformers.cli.serving.utils import X_REQUEST_ID, BaseHandler

from .calls import CALL, Call, CallRunner
from .choices import Choices, ShownChoice, with_cached
from .errors import Refusal, described, read
from .limits import Limits, check_prompt
from .structured import grammar_for

POLL = 0.1  # polling interval in seconds, to notice that a client has left or the server is to end
logger = logging.getLogger(__name__)


class Endpoint:
    """An OpenAI address as an ASGI application, which reads and tokenizes in the thread of `preparing`."""

    def __init__(self, handler: BaseHandler, kind: type, limits: Limits, calls: CallRunner, preparing: Executor):
        self.handler, self.kind, self.limits, self.calls, self.preparing = handler, kind, limits, calls, preparing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(Request(scope, receive), CALL.get())
        await response(scope, receive, send)

    async def _answer(self, request: Request, call: Call) -> Response:
        """Returns the response when it is complete or its stream begins."""
        name = request.headers.get(X_REQUEST_ID) or str(uuid.uuid4())
        body, prompts = await self._watching(request, self._read(await request.body(), call), call)
        choices, answers = Choices(len(prompts), call.parameters.count()), []
        for number, prompt in enumerate(prompts):
            responses = await self._watching(request, self._handle(body, prompt, name, call), call)
            response = responses[0]
            if isinstance(response, StreamingResponse):
                streams = [response.body_iterator for response in responses]
                response.body_iterator = self._stream(streams, choices, body, prompts, name, call)
                break
            for index, response in enumerate(responses):
                answers.append(with_cached(json.loads(response.body), call.cached))
                if call.parameters.edits() or len(prompts) > 1:
                    shown = ShownChoice(call, number, index, self.limits.token_names)
                    answers[-1] = shown.whole(answers[-1])
                    choices.number(answers[-1], number, index)
        if len(answers) > 1:
            answers[-1]["choices"] = [choice for answer in answers for choice in answer["choices"]]
        if answers:
            response = JSONResponse(answers[-1])
        response.headers[X_REQUEST_ID] = name
        return response

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

    async def _read(self, body: bytes, call: Call) -> tuple[dict, list[list[int] | None]]:
        """Returns a request for transformers' handler, and the tokens of its prompts, or `[None]` for a chat."""
        return await asyncio.get_running_loop().run_in_executor(self.preparing, self._read_now, body, call)

    def _read_now(self, body: bytes, call: Call) -> tuple[dict, list[list[int] | None]]:
        call.parameters = request = read(self.kind, body)
        self.limits.check(request)
        call.grammar = grammar_for(request, self.limits.model, self.limits.tokenizer)
        read_text = self.limits.tokenizer
        prompts = [read_text(one)["input_ids"] if isinstance(one, str) else one for one in request.prompts()]
        with self.calls.counting_refusals():
            for tokens in prompts:
                check_prompt(self.limits.model, tokens)
        if request.likely() is not None:
            self.limits.token_names.spelled  # noqa: B018  may take seconds the first time
        return {**request.body(), "model": self.limits.names[0]}, prompts or [None]

    async def _handle(self, body: dict, prompt: list[int] | None, name: str, call: Call) -> list[Response]:
        """Returns the responses of transformers' handler for the choices of one prompt."""
        call.begin(prompt)
        begun = []
        try:
            for _ in range(call.parameters.count()):
                begun.append(await begun_in(self.preparing, self._choice(body, name, call)))
            results = await asyncio.gather(*begun, return_exceptions=True)
            for error in filter(lambda result: isinstance(result, Exception), results):
                raise error
            return results
        finally:
            for task in begun:
                task.cancel()  # does nothing to a task that is done

    async def _choice(self, body: dict, name: str, call: Call) -> Response:
        try:
            return await self.handler.handle_request(dict(body), name)
        except Exception as error:
            if isinstance(error, (KeyError, IndexError, AttributeError)) and not call.is_prepared:
                raise Refusal(f"The request cannot be read: {error!r}.") from error
            raise call.blamed(error) from error

    async def _stream(
        self, streams: list[AsyncIterator], choices: Choices, body: dict, prompts: list, name: str, call: Call
    ) -> AsyncIterator[str]:
        """
        Yields the chunks of the streams that have begun, and then those of the other prompts, as clients get them.
        transformers' text of an error becomes OpenAI's error object.
        """
        for number, prompt in enumerate(prompts):
            if number:
                responses = await self._handle(body, prompt, name, call)
                streams = [response.body_iterator for response in responses]
            shown = [ShownChoice(call, number, index, self.limits.token_names) for index in range(len(streams))]
            async for index, chunk in merged(streams):
                is_error = call.error is not None
                if is_error:
                    status, error = described(call.blamed(call.error))
                    if status == 500:
                        logger.error("A call failed.", exc_info=call.error)
                    chunk = chunk.replace(f'{{"error": "{call.error}"}}\n\n', f"{json.dumps(error)}\n\n")
                events = []
                for line in filter(None, chunk.split("\n\n")):
                    event = with_cached(json.loads(line.removeprefix("data: ")), call.cached)
                    choices.number(event, number, index)
                    events += [f"data: {json.dumps(one)}\n\n" for one in shown[index].events(event)]
                yield "".join(events)
                if is_error and "error" in event:  # the other choices have the same
                    return
            if call.error is not None:
                return


async def merged(streams: list[AsyncIterator]) -> AsyncIterator[tuple[int, str]]:
    """Yields the chunks of several streams as they come, each after the number of its stream."""

    async def following(stream: AsyncIterator) -> str | None:
        return await anext(stream, None)

    tasks = {asyncio.create_task(following(stream)): index for index, stream in enumerate(streams)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=tasks.get):
                index, chunk = tasks.pop(task), task.result()
                if chunk is not None:
                    tasks[asyncio.create_task(following(streams[index]))] = index
                    yield index, chunk
    finally:
        for task in tasks:
            task.cancel()


async def begun_in(thread: Executor, coroutine: Coroutine) -> asyncio.Future:
    """
    Runs a coroutine in another thread until it first waits, and then in the event loop. Returns its future once it
    waits. Raises what it raises until then.
    """
    results = []

    def begin() -> None:
        try:
            coroutine.send(None)
        except StopIteration as end:
            results.append(end.value)

    loop = asyncio.get_running_loop()
    await loop.run_in_executor(thread, contextvars.copy_context().run, begin)
    if not results:
        return asyncio.create_task(coroutine)
    future = loop.create_future()
    future.set_result(results[0])
    return future
