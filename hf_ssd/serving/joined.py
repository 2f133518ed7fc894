"""Calls whose rows join a running batch, so that several requests are answered at a time."""

import secrets

import torch

from ..generation.continuous import ContinuousBatching
from ..generation.streaming import BatchStreamer, RoundStreamer
from ..stats import SSDStats

LOOK = 0.1  # seconds between two looks whether anybody still waits


class OfRow(BatchStreamer, RoundStreamer):
    """Passes what the batch has for one request on as what a call has for its row number `row`."""

    def __init__(self, streamer, row: int):
        self.streamer, self.row = streamer, row
        if streamer.on_logits is not None:
            self.on_logits = lambda _, tokens, logits: streamer.on_logits(row, tokens, logits)

    def put(self, value: torch.LongTensor) -> None:
        if self.row == 0:  # the prompt, of which all rows have the same
            self.streamer.put(value)

    def on_tokens(self, _: int, tokens: torch.LongTensor) -> None:
        self.streamer.on_tokens(self.row, tokens)

    def on_round(self, stats: SSDStats) -> None:
        if self.row == 0:
            self.streamer.pass_on(stats)

    def end(self) -> None:
        """Does nothing, as the streamer of the call."""


def generate(batch: ContinuousBatching, streamer, settings: list[dict], seed: int | None, **kwargs) -> None:
    """
    Runs a call as requests of the batch, one for each row, whose `settings` are arguments of `generate()` beside those
    that all rows have. `streamer.check` ends the call by raising.
    """
    seed = secrets.randbits(31) if seed is None else seed
    requests: list[str] = []
    try:
        for row, own in enumerate(settings):
            streamer_of_row = OfRow(streamer, row)
            requests.append(batch.add_request(**kwargs, **own, streamer=streamer_of_row, seed=seed + row))
        for request in requests:
            while batch.result_of(request, timeout=LOOK) is None:
                streamer.check()
        streamer.call.cached = batch.requests[requests[0]][0].known  # the prompt counts once, however many rows it has
    finally:
        for request in requests:
            batch.forget(request)
