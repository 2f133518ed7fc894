"""Streams tokens as they come: one of each row at a time, as in transformers, each row by itself, or by rounds."""

from collections.abc import Callable

import torch
from transformers.generation.streamers import BaseStreamer

from ..stats import SSDStats
from .sequences import Sequences


class BatchStreamer(BaseStreamer):
    """
    A streamer for every row of a batch, where transformers' own take one row. Rows advance by different amounts, so
    each is streamed by itself.

    ```python
    streamer = hf_ssd.BatchStreamer(lambda row, tokens: print(row, tokenizer.decode(tokens)))
    target.generate(**inputs, streamer=streamer, assistant_model=draft, ssd_config=hf_ssd.SSDConfig())
    ```

    Args:
        on_tokens (`Callable`): Called with the number of a row and its new tokens, a `torch.LongTensor` of shape
            `(count,)` on the CPU. The prompt is not streamed, nor what pads a finished row. (In plain `generate()`,
            where this works too, the padding is.)
        on_end (`Callable`, *optional*): Called without arguments when all rows are done.
    """

    def __init__(self, on_tokens: Callable[[int, torch.LongTensor], None], on_end: Callable[[], None] = lambda: None):
        self.on_tokens, self.on_end = on_tokens, on_end

    def put(self, value: torch.LongTensor) -> None:
        """Plain `generate()` calls this with the prompts first, and then with one token of each row."""
        if value.dim() == 1:
            for row, token in enumerate(value):
                self.on_tokens(row, token[None])

    def end(self) -> None:
        self.on_end()


class RoundStreamer(BaseStreamer):
    """
    A streamer that is told of each round, for a display or for figures while a call is under way.

    ```python
    streamer = hf_ssd.RoundStreamer(lambda stats: print(stats.records[-1:]), TextStreamer(tokenizer))
    target.generate(**inputs, streamer=streamer, assistant_model=draft, ssd_config=hf_ssd.SSDConfig())
    ```

    Args:
        on_round (`Callable`): Called with the [`SSDStats`] of the call when the tokens of a round were streamed. There
            is no record yet after the prefill; afterwards the last one is of this round. Plain `generate()` does not
            call it.
        streamer (`BaseStreamer`, *optional*): Where the tokens go.
    """

    def __init__(self, on_round: Callable[[SSDStats], None], streamer: BaseStreamer | None = None):
        self.on_round, self.streamer = on_round, streamer

    def put(self, value: torch.LongTensor) -> None:
        if self.streamer is not None:
            self.streamer.put(value)

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()


class Stream:
    """Feeds the user's streamer with the tokens of `sequences` that are sure, and knows how far it has come."""

    def __init__(self, streamer: BaseStreamer, sequences: Sequences):
        self.streamer, self.sequences = streamer, sequences
        self.lengths = [sequences.prompt_length] * sequences.batch_size
        self.columns = sequences.prompt_length

    def update(self, stats: SSDStats) -> None:
        """Streams what is new."""
        if isinstance(self.streamer, BatchStreamer):
            for row, before in enumerate(self.lengths):
                self.lengths[row] = length = self.sequences.settled(row)
                if length > before:
                    self.streamer.on_tokens(row, self.sequences.ids[row, before:length].cpu().clone())
            return
        before, self.columns = self.columns, self.sequences.settled_columns
        for tokens in self.sequences.as_in_plain_generation(self.columns)[:, before:].cpu().unbind(1):
            self.streamer.put(tokens.clone())  # which is the streamer's own, whatever it does with it
        if isinstance(self.streamer, RoundStreamer):
            self.streamer.on_round(stats)

    def end(self) -> None:
        self.streamer.end()
