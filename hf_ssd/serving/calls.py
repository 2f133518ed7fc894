"""Runs the calls of a server in turn, and checks and counts them."""

import asyncio
import contextlib
import contextvars
import inspect
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    DirectStreamer,
    InferenceThread,
    _GenerationCancelled,
    _StreamError,
)
from transformers.generation.streamers import BaseStreamer

from ..generation.streaming import RoundStreamer
from ..stats import SSDStats
from .answers import LenientParser
from .errors import Refusal
from .limits import check_prompt, check_settings, positions_of
from .metrics import CANCELLED, FAILED, FINISHED, REFUSED, Totals
from .parameters import Parameters
from .penalties import Penalties
from .stops import StopCriteria

END_TIMEOUT = 10.0  # seconds for a running call to reach its next round


@dataclass(eq=False)
class Call:
    """A request on its way through the server."""

    loop: asyncio.AbstractEventLoop  # the event loop that answers it
    parameters: Parameters = field(default_factory=Parameters)
    prompt: list[int] | None = None  # tokens that take the place of those that transformers' handler has made
    has_left: threading.Event = field(default_factory=threading.Event)  # set when nobody waits for its answer any more
    is_prepared: bool = False  # whether its prompt is tokenized
    has_begun: bool = False  # whether a token of its answer was generated
    error: Exception | None = None  # raised by its generation
    tokens: int = 0  # generated so far
    seconds: float = 0.0  # of generating, without waiting for a turn

    def blamed(self, error: Exception) -> Exception:
        """Returns an error as the client is to see it: one of its own settings, or of the server once there is text."""
        if self.parameters.generation_config is not None and not self.has_begun and isinstance(error, LookupError):
            return Refusal(f"`generation_config` cannot be used: {error!r}.", "generation_config")
        if self.has_begun and not isinstance(error, (Refusal, _GenerationCancelled)):
            return RuntimeError(str(error) or type(error).__name__)
        return error


CALL: contextvars.ContextVar[Call] = contextvars.ContextVar("call")  # of the request that is answered


@contextlib.contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seeds torch's generators of the CPU and the device, and restores their state afterwards."""
    devices = [device] if device.type in ("cuda", "xpu") else []
    with torch.random.fork_rng(devices, enabled=seed is not None, device_type=device.type if devices else "cuda"):
        if seed is not None:
            torch.manual_seed(seed)
        yield


class CountingStreamer(RoundStreamer):
    """Counts the tokens and rounds of a call, passes both on, and ends the call when nobody waits for it."""

    def __init__(self, calls: "TurnTaking", call: Call, streamer: BaseStreamer | None, totals: Totals):
        super().__init__(self._count, streamer)
        self.calls, self.call, self.totals = calls, call, totals

    def check(self) -> None:
        """Raises an error if the call is to end."""
        if self.call.has_left.is_set():
            raise _GenerationCancelled
        if self.calls.are_over:
            raise Refusal("The server ends.", status=503)

    def _count(self, stats: SSDStats) -> None:
        self.totals.add_round(stats)
        if isinstance(self.streamer, RoundStreamer):
            self.streamer.on_round(stats)

    def put(self, value: torch.LongTensor) -> None:
        self.check()
        if value.dim() == 1:  # the prompt comes first, with two dimensions
            self.call.has_begun = True
            self.totals.tokens += len(value)
            self.call.tokens += len(value)
        super().put(value)

    def end(self) -> None:
        """Does nothing: [`TurnTaking`] tells the client when it has counted the call."""


class TurnTaking(BaseGenerateManager):
    """Runs calls in turn in a single thread, and checks and counts them. transformers' handlers call its methods."""

    def __init__(self, totals: Totals, max_tokens: int | None = None):
        self.totals, self.max_tokens, self.are_over = totals, max_tokens, False
        self.submit = InferenceThread().submit

    def stop(self) -> None:
        """Lets each call end with its next round."""
        self.are_over = True

    async def end(self) -> None:
        """Ends all calls, and waits until their thread is idle: a process that ends while it computes is aborted."""
        self.stop()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.async_submit(lambda: None), END_TIMEOUT)

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, response_parser=None):
        """Called in the thread that prepares."""
        call, queue, tokenizer = CALL.get(), asyncio.Queue(), getattr(processor, "tokenizer", processor)
        self.prepare(model, inputs, gen_config, call)
        if response_parser is not None:
            response_parser = LenientParser(response_parser, tokenizer.all_special_tokens)
        streamer = DirectStreamer(tokenizer.backend_tokenizer, call.loop, queue, response_parser)

        def run() -> None:
            try:
                self.generate(model, call, streamer, **inputs, generation_config=gen_config, tokenizer=processor)
            except Exception as error:
                end = None if isinstance(error, _GenerationCancelled) else _StreamError(str(error))
                call.loop.call_soon_threadsafe(queue.put_nowait, end)

        self.submit(run)
        return queue, streamer

    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        call = CALL.get()
        self.prepare(model, inputs, gen_config, call)
        options = {"generation_config": gen_config, "tokenizer": processor}
        sequences = await self.async_submit(self.generate, model, call, **inputs, **options)
        length = inputs["input_ids"].shape[-1]
        tokens = sequences[0, length:]
        return processor.decode(tokens, skip_special_tokens=True), length, tokens

    async def async_submit(self, fn, *args, **kwargs):
        """Returns the result of a function in the thread that generates. The function ends also if nobody waits."""
        await asyncio.sleep(0)  # here a coroutine that `requests.begun_in` has begun goes on in the event loop
        return await asyncio.shield(asyncio.wrap_future(self.submit(fn, *args, **kwargs)))

    def generate(self, model: PreTrainedModel, call: Call, streamer: BaseStreamer | None = None, **kwargs):
        """Runs `generate()` with the call's seed and stop strings, counts the call, and ends it if nobody waits."""
        end, start = FAILED, time.perf_counter()
        try:
            counting = CountingStreamer(self, call, streamer, self.totals)
            counting.check()
            length, penalties = kwargs["input_ids"].shape[1], call.parameters.penalties()
            if stops := call.parameters.stops():
                tokenizer = getattr(kwargs["tokenizer"], "tokenizer", kwargs["tokenizer"]).backend_tokenizer
                kwargs["stopping_criteria"] = StoppingCriteriaList([StopCriteria(stops, tokenizer, length)])
            if any(penalties):
                kwargs["logits_processor"] = LogitsProcessorList([Penalties(length, *penalties)])
            with seeded(call.parameters.seed, model.device):
                output = model.generate(**kwargs, streamer=counting)
            end = FINISHED
        except _GenerationCancelled:  # the client has left
            end = CANCELLED
            raise
        except Exception as error:
            end = CANCELLED if self.are_over else FAILED
            call.error = error
            raise
        finally:
            self.totals.requests[end] += 1
            call.seconds += time.perf_counter() - start
        if streamer is not None:
            streamer.end()
        return output

    @contextlib.contextmanager
    def counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except Refusal:
            self.totals.requests[REFUSED] += 1
            raise

    def prepare(self, model: PreTrainedModel, inputs: dict, gen_config: GenerationConfig, call: Call) -> None:
        """Puts the call's own prompt, settings and limits in place. Raises [`Refusal`] if the model cannot answer."""
        call.is_prepared, call.has_begun = True, False
        if call.prompt is not None:
            inputs.clear()
            inputs["input_ids"] = torch.tensor([call.prompt], device=model.device)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if "token_type_ids" not in inspect.signature(model.forward).parameters:
            inputs.pop("token_type_ids", None)
        settings = call.parameters.settings()
        for name, value in settings.items():
            setattr(gen_config, name, value)
        known_as = {"sequence_bias": "logit_bias"} if "sequence_bias" in settings else {}
        longest, length = positions_of(model), inputs["input_ids"].shape[-1]
        with self.counting_refusals():
            check_prompt(model, inputs["input_ids"].flatten().tolist())
            check_settings(model, gen_config, known_as)
        limits = [gen_config.max_new_tokens, longest and longest - length, self.max_tokens]
        gen_config.max_new_tokens = min(filter(None, limits), default=None)
