"""Runs the calls of a server in turn, and checks and counts them."""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.cli.serving.utils import GenerateManager, _GenerationCancelled
from transformers.generation.streamers import BaseStreamer

from ..generation.streaming import RoundStreamer
from ..stats import SSDStats
from .errors import Refusal
from .metrics import CANCELLED, FAILED, FINISHED, REFUSED, Totals
from .stops import StopCriteria

END_TIMEOUT = 10.0  # seconds for a running call to reach its next round


@dataclass(eq=False)
class Call:
    """A request on its way through the server."""

    loop: asyncio.AbstractEventLoop  # the event loop that answers it
    seed: int | None = None
    settings: dict = field(default_factory=dict)  # of its generation config, not set by transformers' handlers
    stop: list[str] = field(default_factory=list)  # strings before which its text ends
    has_left: threading.Event = field(default_factory=threading.Event)  # set when nobody waits for its answer any more
    is_prepared: bool = False  # whether its prompt is tokenized
    error: Exception | None = None  # raised by its generation


CALL: contextvars.ContextVar[Call] = contextvars.ContextVar("call")


@contextlib.contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seeds torch's generators of the CPU and the device, and restores their state afterwards."""
    devices = [device] if device.type in ("cuda", "xpu") else []
    with torch.random.fork_rng(devices, enabled=seed is not None, device_type=device.type if devices else "cuda"):
        if seed is not None:
            torch.manual_seed(seed)
        yield


@types.coroutine
def the_loop():
    """A coroutine that began in another thread awaits this to continue in the event loop. See `requests.begun_in`."""
    yield


class CountingStreamer(RoundStreamer):
    """Counts the tokens and rounds of a call, passes both on, and ends the call when nobody waits for it."""

    def __init__(self, calls: "TurnTaking", call: Call, streamer: BaseStreamer | None):
        super().__init__(self._count, streamer)
        self.calls, self.call = calls, call

    def check(self) -> None:
        """Raises an error if the call is to end."""
        if self.call.has_left.is_set():
            raise _GenerationCancelled
        if self.calls.are_over:
            raise Refusal("The server ends.", status=503)

    def _count(self, stats: SSDStats) -> None:
        self.calls.totals.add_round(stats)
        if isinstance(self.streamer, RoundStreamer):
            self.streamer.on_round(stats)

    def put(self, value: torch.LongTensor) -> None:
        self.check()
        if value.dim() == 1:  # the prompt comes first, with two dimensions
            self.calls.totals.tokens += len(value)
        super().put(value)

    def end(self) -> None:
        """Does nothing: [`TurnTaking`] tells the client when it has counted the call."""


class TurnTaking(GenerateManager):
    """transformers' manager, which runs calls in turn in a single thread. This class also checks and counts them."""

    def __init__(self, totals: Totals, max_tokens: int | None = None):
        super().__init__()
        self.totals, self.max_tokens, self.are_over = totals, max_tokens, False

    async def end(self) -> None:
        """Ends all calls, and waits until their thread is idle: a process that ends while it computes is aborted."""
        self.are_over = True
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.async_submit(lambda: None), END_TIMEOUT)

    def generate_streaming(self, model, processor, inputs, gen_config, *args, **kwargs):
        """Called in the thread that prepares. The stream's queue belongs to the event loop, so it is created there."""
        call = CALL.get()
        self.prepare(model, inputs, gen_config, call)
        begin = super().generate_streaming

        async def in_the_loop():
            return begin(self.counted(model, call), processor, inputs, gen_config, *args, **kwargs)

        return asyncio.run_coroutine_threadsafe(in_the_loop(), call.loop).result(END_TIMEOUT)

    async def generate_non_streaming(self, model, processor, inputs, gen_config, *args, **kwargs):
        call = CALL.get()
        self.prepare(model, inputs, gen_config, call)
        counted = self.counted(model, call)
        return await super().generate_non_streaming(counted, processor, inputs, gen_config, *args, **kwargs)

    async def async_submit(self, fn, *args, **kwargs):
        """As in transformers, but a result that nobody waits for any more is dropped."""
        await the_loop()
        return await asyncio.shield(asyncio.wrap_future(self.submit(fn, *args, **kwargs)))

    def counted(self, model: PreTrainedModel, call: Call) -> types.SimpleNamespace:
        """Returns a stand-in for the model of a call that has only `generate()`."""
        return types.SimpleNamespace(generate=functools.partial(self._generate, model, call))

    def _generate(self, model: PreTrainedModel, call: Call, streamer: BaseStreamer | None = None, **kwargs):
        """Runs `generate()` with the call's seed and stop strings, counts the call, and ends it if nobody waits."""
        end = FAILED
        try:
            counting = CountingStreamer(self, call, streamer)
            counting.check()
            if call.stop:
                tokenizer = getattr(kwargs["tokenizer"], "tokenizer", kwargs["tokenizer"]).backend_tokenizer
                criteria = StopCriteria(call.stop, tokenizer, kwargs["input_ids"].shape[1])
                kwargs["stopping_criteria"] = StoppingCriteriaList([criteria])
            with seeded(call.seed, model.device):
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
        if streamer is not None:
            streamer.end()
        return output

    def prepare(self, model: PreTrainedModel, inputs: dict, gen_config: GenerationConfig, call: Call) -> None:
        """
        Removes `token_type_ids` if the model does not take them, sets the call's own settings, and limits the length of
        the text to the model's positions and of the answer to `max_tokens`. Raises `ValueError` for a request that the
        model cannot answer.
        """
        call.is_prepared = True
        if "token_type_ids" not in inspect.signature(model.forward).parameters:
            inputs.pop("token_type_ids", None)
        for name, value in call.settings.items():
            setattr(gen_config, name, value)
        config = model.config.get_text_config(decoder=True)
        longest, length = getattr(config, "max_position_embeddings", None), inputs["input_ids"].shape[-1]
        try:
            if not length:
                raise ValueError("The prompt is empty; it must have at least one token.")
            if longest is not None and length >= longest:
                raise ValueError(f"The prompt has {length} tokens; the model takes fewer than {longest}.")
            if (gen_config.num_return_sequences or 1) > 1 or gen_config.return_dict_in_generate:
                raise ValueError("`num_return_sequences` and `return_dict_in_generate` are not supported here.")
            if wrong := [token for (token,) in call.settings.get("sequence_bias", ()) if token >= config.vocab_size]:
                raise ValueError(f"`logit_bias` names token {wrong[0]}; the model has {config.vocab_size}.")
        except ValueError:
            self.totals.requests[REFUSED] += 1
            raise
        limits = [gen_config.max_new_tokens, longest and longest - length, self.max_tokens]
        gen_config.max_new_tokens = min(filter(None, limits), default=None)
