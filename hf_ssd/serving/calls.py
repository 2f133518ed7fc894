"""The calls of a server: checked, counted, one after the other."""

import asyncio
import contextlib
import contextvars
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

END_TIMEOUT = 10.0  # seconds for the call under way to come to its next round


@dataclass(eq=False)
class Call:
    """
    One request on its way through the server.

    Args:
        loop (`asyncio.AbstractEventLoop`): The event loop that answers it.
        seed (`int`, *optional*): Of its tokens.
        settings (`dict`): Fields of its generation config that transformers' handlers do not set.
        stop (`list[str]`): Strings before which its text ends.
        has_left (`threading.Event`): Set when nobody waits for its answer any more.
        is_prepared (`bool`): Whether its prompt is tokenized.
        error (`Exception`, *optional*): What its generation raised.
    """

    loop: asyncio.AbstractEventLoop
    seed: int | None = None
    settings: dict = field(default_factory=dict)
    stop: list[str] = field(default_factory=list)
    has_left: threading.Event = field(default_factory=threading.Event)
    is_prepared: bool = False
    error: Exception | None = None


CALL: contextvars.ContextVar[Call] = contextvars.ContextVar("call")


@contextlib.contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seeds torch's generators, of the CPU and the device, and puts their state back."""
    if seed is None:
        yield
        return
    devices = {"devices": [device], "device_type": device.type} if device.type in ("cuda", "xpu") else {"devices": []}
    with torch.random.fork_rng(**devices):
        torch.manual_seed(seed)
        yield


@types.coroutine
def the_loop():
    """Awaited where a coroutine that began in another thread goes on in the event loop; see `requests.begun_in`."""
    yield


class CountedModel:
    """
    The model as the server calls it, whose calls are counted, seeded, and ended when nobody waits for them.

    Args:
        model (`PreTrainedModel`): An enabled model.
        calls ([`TurnTaking`]): The manager, which has the totals that they are added to.
        call ([`Call`]): The request.
    """

    def __init__(self, model: PreTrainedModel, calls: "TurnTaking", call: Call):
        self.model, self.calls, self.call = model, calls, call

    def generate(self, streamer: BaseStreamer | None = None, **kwargs):
        """`generate()` of the model."""
        end = FAILED
        try:
            counting = CountingStreamer(self, streamer)
            counting.check()
            if self.call.stop:
                kwargs["stopping_criteria"] = StoppingCriteriaList([self._stop_criteria(**kwargs)])
            with seeded(self.call.seed, self.model.device):
                output = self.model.generate(**kwargs, streamer=counting)
            end = FINISHED
        except _GenerationCancelled:  # the client has left
            end = CANCELLED
            raise
        except Exception as error:
            end = CANCELLED if self.calls.are_over else FAILED
            self.call.error = error
            raise
        finally:
            self.calls.totals.requests[end] += 1
        if streamer is not None:
            streamer.end()
        return output

    def _stop_criteria(self, tokenizer, input_ids, **kwargs) -> StopCriteria:
        backend = getattr(tokenizer, "tokenizer", tokenizer).backend_tokenizer
        return StopCriteria(self.call.stop, backend, input_ids.shape[1])


class CountingStreamer(RoundStreamer):
    """Counts tokens and rounds, and passes both on."""

    def __init__(self, counted: CountedModel, streamer: BaseStreamer | None):
        super().__init__(self._count, streamer)
        self.calls, self.call, self.totals = counted.calls, counted.call, counted.calls.totals

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
            self.totals.tokens += len(value)
        super().put(value)

    def end(self) -> None:
        """Does nothing: a client learns that its call has ended when that is counted, by [`CountedModel`]."""


class TurnTaking(GenerateManager):
    """
    transformers' manager, which lets calls take turns in one thread. Here they are checked first and counted.

    Args:
        totals ([`Totals`]): What they are added to.
    """

    def __init__(self, totals: Totals):
        super().__init__()
        self.totals, self.are_over = totals, False

    async def end(self) -> None:
        """Ends all calls, and waits until their thread is at rest: a program that ends while it computes is aborted."""
        self.are_over = True
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.async_submit(lambda: None), END_TIMEOUT)

    def generate_streaming(self, model, processor, inputs, gen_config, *args, **kwargs):
        """Called in the thread that prepares: the stream's queue is made in the event loop, to which it belongs."""
        call = CALL.get()
        self.prepare(model, inputs, gen_config, call)
        begin = super().generate_streaming

        async def in_the_loop():
            return begin(self.counted(model, call), processor, inputs, gen_config, *args, **kwargs)

        return asyncio.run_coroutine_threadsafe(in_the_loop(), call.loop).result(END_TIMEOUT)

    async def generate_non_streaming(self, model, processor, inputs, gen_config, *args, **kwargs):
        call = CALL.get()
        self.prepare(model, inputs, gen_config, call)
        await the_loop()
        counted = self.counted(model, call)
        return await super().generate_non_streaming(counted, processor, inputs, gen_config, *args, **kwargs)

    def async_submit(self, fn, *args, **kwargs) -> asyncio.Future:
        """As transformers', but a result that nobody waits for any more is dropped."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def settle(done) -> None:
            if future.cancelled():
                return
            if done.exception() is None:
                future.set_result(done.result())
            else:
                future.set_exception(done.exception())

        submitted = self.submit(fn, *args, **kwargs)
        submitted.add_done_callback(lambda done: loop.call_soon_threadsafe(settle, done))
        return future

    def counted(self, model: PreTrainedModel, call: Call) -> CountedModel:
        return CountedModel(model, self, call)

    def prepare(self, model: PreTrainedModel, inputs: dict, gen_config: GenerationConfig, call: Call) -> None:
        """
        Takes out of the inputs what the tokenizer gives and the model does not take, and lets the text end where the
        model's positions do.

        Raises:
            `ValueError`: the prompt is empty, or fills all positions; or the request asks for several answers, or for
                tokens that the model does not have.
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
        if longest is not None:
            gen_config.max_new_tokens = min(gen_config.max_new_tokens or longest, longest - length)
