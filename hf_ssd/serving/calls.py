"""The calls of a server: checked, counted, one after the other."""

import asyncio
import contextlib
import inspect

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cli.serving.utils import GenerateManager, _GenerationCancelled
from transformers.generation.streamers import BaseStreamer

from ..generation.streaming import RoundStreamer
from ..stats import SSDStats
from .metrics import CANCELLED, FAILED, FINISHED, REFUSED, Totals

END_TIMEOUT = 10.0  # seconds for the call under way to come to its next round


class CountedModel:
    """
    The model as the server calls it, whose calls are counted.

    Args:
        model (`PreTrainedModel`): An enabled model.
        calls ([`TurnTaking`]): The manager, which has the totals that they are added to.
    """

    def __init__(self, model: PreTrainedModel, calls: "TurnTaking"):
        self.model, self.calls = model, calls

    def generate(self, streamer: BaseStreamer | None = None, **kwargs):
        """`generate()` of the model."""
        end = FAILED
        try:
            output = self.model.generate(**kwargs, streamer=CountingStreamer(self.calls, streamer))
            end = FINISHED
        except _GenerationCancelled:  # the client has left, or the server ends
            end = CANCELLED
            raise
        finally:
            self.calls.totals.requests[end] += 1
        if streamer is not None:
            streamer.end()
        return output


class CountingStreamer(RoundStreamer):
    """Counts tokens and rounds, and passes both on."""

    def __init__(self, calls: "TurnTaking", streamer: BaseStreamer | None):
        super().__init__(self._count, streamer)
        self.calls, self.totals = calls, calls.totals

    def _count(self, stats: SSDStats) -> None:
        self.totals.add_round(stats)
        if isinstance(self.streamer, RoundStreamer):
            self.streamer.on_round(stats)

    def put(self, value: torch.LongTensor) -> None:
        if self.calls.are_over:
            raise _GenerationCancelled
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
        self.prepare(model, inputs, gen_config)
        return super().generate_streaming(self.counted(model), processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(self, model, processor, inputs, gen_config, *args, **kwargs):
        self.prepare(model, inputs, gen_config)
        counted = self.counted(model)
        return await super().generate_non_streaming(counted, processor, inputs, gen_config, *args, **kwargs)

    def counted(self, model: PreTrainedModel) -> CountedModel:
        return CountedModel(model, self)

    def prepare(self, model: PreTrainedModel, inputs: dict, gen_config: GenerationConfig) -> None:
        """
        Takes out of the inputs what the tokenizer gives and the model does not take, and lets the text end where the
        model's positions do.

        Raises:
            `ValueError`: the prompt is empty, or fills all positions.
        """
        if "token_type_ids" not in inspect.signature(model.forward).parameters:
            inputs.pop("token_type_ids", None)
        longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        length = inputs["input_ids"].shape[-1]
        if not length or (longest is not None and length >= longest):
            self.totals.requests[REFUSED] += 1
            if not length:
                raise ValueError("The prompt is empty; it must have at least one token.")
            raise ValueError(f"The prompt has {length} tokens; the model takes fewer than {longest}.")
        if longest is not None:
            gen_config.max_new_tokens = min(gen_config.max_new_tokens or longest, longest - length)
