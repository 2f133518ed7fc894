"""Runs the calls of a server, in a running batch or in turn, and checks and counts them."""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cli.serving.utils import InferenceThread, _GenerationCancelled
from transformers.generation.streamers import BaseStreamer

from ..generation.continuous import BatchIsFull, ContinuousBatching
from ..generation.streaming import BatchStreamer, RoundStreamer
from ..grammar import Grammar
from ..stats import SSDStats
from .answers import LenientParser
from .errors import Refusal, described
from .limits import Limits
from .logprobs import Entry, entries_of_prompt
from .metrics import CANCELLED, FAILED, FINISHED, REFUSED, Totals
from .parameters import Parameters
from .rows import Choice, Penalties, Row, StopCriteria

END_TIMEOUT = 10  # seconds for a running call to reach its next round
POLL = 0.1  # seconds between two looks whether a client has left or the server is to end
MOST_WAITING = 256  # threads that wait for answers; further requests wait for a thread
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Call:
    """A request on its way through the server."""

    loop: asyncio.AbstractEventLoop  # the event loop that answers it
    parameters: Parameters = field(default_factory=Parameters)
    grammar: Grammar | None = None  # that the answer follows
    name: str = ""  # that the client or the server gave it
    body: dict = field(default_factory=dict)  # as transformers' handler reads it
    prompts: list[list[int] | None] = field(default_factory=list)  # tokens of each, `None` for a chat
    prompt: list[int] | None = None  # of these, which takes the place of the tokens that transformers' handler makes
    has_left: threading.Event = field(default_factory=threading.Event)  # set when nobody waits for its answer any more
    last_token_at: float | None = None  # `None`: no token of its answer was generated
    error: Exception | None = None  # raised by its generation
    choices: list[Choice] = field(default_factory=list)  # of the answer to the prompt, once this is tokenized
    rows: list[Row] = field(default_factory=list)  # of `generate()`: for each choice, or for all
    of_prompt: list[Entry] = field(default_factory=list)  # its log-probabilities
    cached: int = 0  # tokens of its prompts that were not read again
    usage: Counter = field(default_factory=Counter)  # of the choices that are complete
    answered: int = 0  # number of these choices
    tokens: int = 0  # generated so far
    seconds: float = 0.0  # of generating
    asked_at: float = field(default_factory=time.perf_counter)

    def begin(self, number: int) -> None:
        self.prompt, self.last_token_at = self.prompts[number], None
        self.choices, self.rows, self.of_prompt = [], [], []

    def row(self, choice: int) -> Row:
        return self.rows[choice % len(self.rows)]

    def blamed(self, error: Exception) -> Exception:
        """Returns an error as the client is to see it: one of its own settings, or of the server once there is text."""
        if isinstance(error, (LookupError, AttributeError)) and not self.choices:
            return Refusal(f"The request cannot be read: {error!r}.")
        has_begun = self.last_token_at is not None
        if self.parameters.generation_config is not None and not has_begun and isinstance(error, LookupError):
            return Refusal(f"`generation_config` cannot be used: {error!r}.", "generation_config")
        if has_begun and not isinstance(error, (Refusal, _GenerationCancelled)):
            return RuntimeError(str(error) or type(error).__name__)
        return error


CALL: contextvars.ContextVar[Call] = contextvars.ContextVar("call")  # of the request that is answered


def too_many() -> Refusal:
    return Refusal("Too many requests wait; try again later.", status=503, headers={"retry-after": "5"})  # seconds


class CountingStreamer(BatchStreamer, RoundStreamer):
    """Counts the tokens of a call's rows, passes them on, and ends the call when nobody waits for it."""

    def __init__(self, calls: "CallRunner", call: Call, rows: list[Row], streamers: list[BaseStreamer]):
        self.calls, self.call, self.rows, self.streamers = calls, call, rows, streamers  # a single row may have several
        if rows[0].likely is not None:
            self.on_logits = lambda row, tokens, logits: rows[row].add_logits(tokens, logits)

    def on_round(self, stats: SSDStats) -> None:
        if self.calls.batch is None:  # which counts its rounds itself
            self.calls.totals.add_round(stats)
        for streamer in self.streamers:
            if isinstance(streamer, RoundStreamer):
                streamer.on_round(stats)

    def put(self, value: torch.LongTensor) -> None:
        self.calls.check(self.call)
        if value.dim() == 1:
            return super().put(value)
        for streamer in self.streamers:  # the prompt comes first, with two dimensions
            streamer.put(value)

    def on_tokens(self, row: int, tokens: torch.LongTensor) -> None:
        self.calls.check(self.call)
        tokens = tokens[: len(self.rows[row].settle(tokens.tolist()))]
        now, last, totals = time.perf_counter(), self.call.last_token_at, self.calls.totals
        if last is None:
            totals.first_token.observe(now - self.call.asked_at)
        elif len(tokens):
            totals.next_token.observe((now - last) / len(tokens))
        self.call.last_token_at = now
        totals.tokens += len(tokens)
        self.call.tokens += len(tokens)
        for streamer in self.streamers[row :: len(self.rows)]:
            streamer.put(tokens)

    def end(self) -> None:
        """Does nothing: [`CallRunner`] tells the client when it has counted the call."""


class CallRunner:
    """Runs calls, in a running `batch` or in turn, and counts them. To transformers' handlers it is their manager."""

    def __init__(self, limits: Limits, totals: Totals, max_tokens: int | None, batch: ContinuousBatching | None):
        self.limits, self.totals, self.max_tokens, self.batch, self.are_over = limits, totals, max_tokens, batch, False
        self.counting, self.without_draft = threading.Lock(), threading.Lock()
        if batch is None:
            self.submit = InferenceThread().submit
            return
        self.submit = ThreadPoolExecutor(MOST_WAITING, "hf_ssd waits for answers").submit
        batch.rows.on_round = totals.add_round
        batch.start()

    def others(self) -> int:
        """Returns how many rows are decoded beside a row."""
        return 0 if self.batch is None else max(0, len(self.batch.rows.live) - 1)

    def check(self, call: Call) -> None:
        """Raises an error if a call is to end."""
        if call.has_left.is_set():
            raise _GenerationCancelled
        if self.are_over:
            raise Refusal("The server ends.", status=503)

    def stop(self) -> None:
        """Lets each call end with its next round."""
        self.are_over = True

    async def end(self) -> None:
        """Ends all calls, and waits until their thread is idle: a process that ends while it computes is aborted."""
        self.stop()
        if self.batch is not None:
            return await asyncio.to_thread(self.batch.stop, END_TIMEOUT)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.async_submit(lambda: None), END_TIMEOUT)

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, response_parser=None):
        """Called in the thread that prepares."""
        call, tokenizer = CALL.get(), self.limits.tokenizer
        self.prepare(inputs, gen_config, call)
        if response_parser is not None:
            response_parser = LenientParser(response_parser, tokenizer.all_special_tokens)
        choice = Choice(call.loop, tokenizer.backend_tokenizer, call.parameters, response_parser)
        call.choices.append(choice)
        if len(call.choices) == call.parameters.get("n", 1):
            self.submit(self._run, call, **inputs, generation_config=gen_config, tokenizer=processor)
        return choice.queue, choice

    def _run(self, call: Call, **options) -> None:
        try:
            self.generate(call, call.choices, **options)
        except Exception as error:
            if call.parameters.stream and described(call.blamed(error))[0] == 500:
                logger.error("A call failed.", exc_info=error)
            for choice in call.choices:
                choice.fail(error)

    async def async_submit(self, fn, *args, **kwargs):
        """Returns the result of a function in the thread that generates. The function ends also if nobody waits."""
        return await asyncio.shield(asyncio.wrap_future(self.submit(fn, *args, **kwargs)))

    def generate(self, call: Call, streamers: list[BaseStreamer], **kwargs) -> None:
        """Runs a call, of as many rows as choices if it samples, and else of one row, and counts how it ended."""
        end, start, parameters, likely = FAILED, time.perf_counter(), call.parameters, call.parameters.likely()
        count = len(streamers) if kwargs["generation_config"].do_sample else 1
        tokenizer = self.limits.tokenizer.backend_tokenizer
        call.rows = [Row(parameters.stops(), likely, tokenizer) for _ in range(count)]
        try:
            self.check(call)
            if parameters.get("echo") and likely is not None:
                check = functools.partial(self.check, call)
                call.of_prompt = entries_of_prompt(self.limits.model, call.prompt, likely, check)
            if self.batch is None or "ssd_config" in kwargs:
                self._run_alone(call, streamers, **kwargs)
            else:
                self._join(call, streamers, **kwargs)
            end = FINISHED
        except Exception as error:
            if self.are_over or isinstance(error, _GenerationCancelled):  # the client has left
                end = CANCELLED
            elif isinstance(error, Refusal):
                end = REFUSED
            call.error = error
            raise
        finally:
            with self.counting:
                self.totals.requests[end] += 1
            call.seconds += time.perf_counter() - start
        for streamer in streamers:
            streamer.end()

    def _run_alone(self, call: Call, streamers: list[BaseStreamer], **kwargs) -> None:
        """Runs a call by itself, and restores the state of torch's generators afterwards if it seeds them."""
        seed, model = call.parameters.seed, self.limits.model
        if len(call.rows) > 1:
            kwargs["generation_config"].num_return_sequences = len(call.rows)
        device = [model.device] if model.device.type in ("cuda", "xpu") else []
        kind = model.device.type if device else "cuda"
        with self.without_draft, torch.random.fork_rng(device, enabled=seed is not None, device_type=kind):
            if seed is not None:
                torch.manual_seed(seed)
            kwargs |= self._settings(call.rows, call, kwargs["input_ids"].shape[1])
            model.generate(**kwargs, streamer=CountingStreamer(self, call, call.rows, streamers))

    def _join(self, call: Call, streamers: list[BaseStreamer], **kwargs) -> None:
        """Runs a call as requests of the batch, one for each row."""
        seed, requests = call.parameters.seed, []
        seed = secrets.randbits(31) if seed is None else seed
        try:
            for number, row in enumerate(call.rows):
                own = self._settings([row], call, kwargs["input_ids"].shape[1])
                own["streamer"] = CountingStreamer(self, call, [row], streamers[number :: len(call.rows)])
                requests.append(self.batch.add_request(**kwargs, **own, seed=seed + number))
            for request in requests:
                while self.batch.result_of(request, timeout=POLL) is None:
                    self.check(call)
            call.cached += self.batch.requests[requests[0]][0].known  # the rows have one prompt, which counts once
        except BatchIsFull:  # with rows that came in between, or of this call
            raise too_many() from None
        finally:
            for request in requests:
                self.batch.forget(request)

    def _settings(self, rows: list[Row], call: Call, length: int) -> dict:
        """Returns criteria and processors of some rows, after a prompt of this length."""
        processors, criteria = LogitsProcessorList(), StoppingCriteriaList()
        penalties = [call.parameters.get(f"{kind}_penalty", 0.0) for kind in ("frequency", "presence")]
        if any(penalties):
            processors.append(Penalties(length, *penalties))
        if call.grammar is not None:
            processors.append(call.grammar if len(rows) == len(call.rows) else call.grammar.another())
        if call.parameters.stops():
            criteria.append(StopCriteria(rows, length))
        return {"logits_processor": processors, "stopping_criteria": criteria}

    @contextlib.contextmanager
    def counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except Refusal:
            with self.counting:
                self.totals.requests[REFUSED] += 1
            raise

    def prepare(self, inputs: dict, gen_config: GenerationConfig, call: Call) -> None:
        """Puts the call's own prompt, settings and limits in place. Raises [`Refusal`] if the model cannot answer."""
        limits = self.limits
        if call.prompt is not None:
            inputs.clear()
            inputs["input_ids"] = torch.tensor([call.prompt], device=limits.model.device)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if "token_type_ids" not in inspect.signature(limits.model.forward).parameters:
            inputs.pop("token_type_ids", None)
        for name, value in call.parameters.settings().items():
            setattr(gen_config, name, value)
        longest, length = limits.positions, inputs["input_ids"].shape[-1]
        with self.counting_refusals():
            if self.batch is not None and self.batch.is_full:
                raise too_many()
            limits.check_prompt(inputs["input_ids"].flatten().tolist())
            limits.check_settings(gen_config, call.parameters)
            most = gen_config.max_new_tokens, longest and longest - length, self.max_tokens
            gen_config.max_new_tokens = most = min(filter(None, most), default=None)
            if gen_config.do_sample and most is not None:
                limits.check_rows(call.parameters.get("n", 1), length + most)
