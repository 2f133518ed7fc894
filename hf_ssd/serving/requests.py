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

from .calls import CALL, Call, TurnTaking
from .errors import Refusal, described, read
from .limits import Limits, check_prompt
from .stops import StreamCut, cut_answer

POLL = 0.1  # polling interval in seconds, to notice that a client has left or the server is to end
logger = logging.getLogger(__name__)


class Choices:
    """Joins the answers to several prompts of one request: numbers their choices, and sums their usage."""

    def __init__(self, count: int):
        self.count, self.usage = count, {}

    def number(self, answer: dict, index: int) -> None:
        """Numbers the choice of an answer or event. The last usage is that of all answers, and the only one."""
        if self.count == 1:
            return
        for choice in answer.get("choices", ()):
            choice["index"] = index
        for name, tokens in (answer.pop("usage", None) or {}).items():
            self.usage[name] = self.usage.get(name, 0) + tokens
            if index == self.count - 1:
                answer["usage"] = self.usage


class Endpoint:
    """An OpenAI address as an ASGI application, which reads and tokenizes in the thread of `preparing`."""

    def __init__(self, handler: BaseHandler, kind: type, limits: Limits, calls: TurnTaking, preparing: Executor):
        self.handler, self.kind, self.limits, self.calls, self.preparing = handler, kind, limits, calls, preparing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(Request(scope, receive), CALL.get())
        await response(scope, receive, send)

    async def _answer(self, request: Request, call: Call) -> Response:
        """Returns the response when it is complete or its stream begins."""
        name = request.headers.get(X_REQUEST_ID) or str(uuid.uuid4())
        body, prompts = await self._watching(request, self._read(await request.body(), call), call)
        choices, answers = Choices(len(prompts)), []
        for index, prompt in enumerate(prompts):
            response = await self._watching(request, self._handle(body, prompt, name, call), call)
            if isinstance(response, StreamingResponse):
                response.body_iterator = self._stream(response.body_iterator, choices, body, prompts, name, call)
                break
            if (stops := call.parameters.stops()) or len(prompts) > 1:
                answers.append(cut_answer(json.loads(response.body), stops))
                choices.number(answers[-1], index)
        if answers:
            joined = [choice for answer in answers for choice in answer["choices"]]
            response = JSONResponse({**answers[-1], "choices": joined})
        response.headers[X_REQUEST_ID] = name
        return response

    async def _watching(self, request: Request, coroutine: Coroutine, call: Call) -> Any:
        """Runs a coroutine, whose first part may take long, and meanwhile watches for the client to leave."""
        task = asyncio.create_task(begun_in(self.preparing, coroutine))
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
        call.parameters = request = read(self.kind, body)
        self.limits.check(request)
        read_text = self.limits.tokenizer
        prompts = [read_text(one)["input_ids"] if isinstance(one, str) else one for one in request.prompts()]
        with self.calls.counting_refusals():
            for tokens in prompts:
                check_prompt(self.limits.model, tokens)
        return {**request.body(), "model": self.limits.names[0]}, prompts or [None]

    async def _handle(self, body: dict, prompt: list[int] | None, name: str, call: Call) -> Response:
        """Returns the response of transformers' handler to one prompt."""
        call.prompt, call.is_prepared, call.has_begun = prompt, False, False
        try:
            return await self.handler.handle_request(dict(body), name)
        except Exception as error:
            if isinstance(error, (KeyError, IndexError, AttributeError)) and not call.is_prepared:
                raise Refusal(f"The request cannot be read: {error!r}.") from error
            raise call.blamed(error) from error

    async def _stream(
        self, chunks: AsyncIterator, choices: Choices, body: dict, prompts: list, name: str, call: Call
    ) -> AsyncIterator[str]:
        """
        Yields the chunks of the stream that has begun, and then those of the other prompts, without stop strings.
        transformers' text of an error becomes OpenAI's error object.
        """
        for index, prompt in enumerate(prompts):
            if index:
                response = await begun_in(self.preparing, self._handle(body, prompt, name, call))
                chunks = response.body_iterator
            cut = StreamCut(call.parameters.stops())
            async for chunk in chunks:
                if call.error is not None:
                    status, error = described(call.blamed(call.error))
                    if status == 500:
                        logger.error("A call failed.", exc_info=call.error)
                    chunk = chunk.replace(f'{{"error": "{call.error}"}}\n\n', f"{json.dumps(error)}\n\n")
                events = []
                for line in filter(None, chunk.split("\n\n")):
                    event = json.loads(line.removeprefix("data: "))
                    choices.number(event, index)
                    events += [f"data: {json.dumps(one)}\n\n" for one in cut.events(event)]
                yield "".join(events)
            if call.error is not None:
                return


async def begun_in(thread: Executor, coroutine: Coroutine) -> Any:
    """Runs a coroutine in another thread until it first waits, and then in the event loop. Returns its result."""
    results = []

    def begin() -> None:
        try:
            coroutine.send(None)
        except StopIteration as end:
            results.append(end.value)

    await asyncio.get_running_loop().run_in_executor(thread, contextvars.copy_context().run, begin)
    return results[0] if results else await asyncio.create_task(coroutine)
