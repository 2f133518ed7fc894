"""Streams tokens as they come: by columns as in transformers, each row by itself, or with a report of each round."""

from collections.abc import Callable

import torch
from transformers.generation.streamers import BaseStreamer

from ..stats import SSDStats
from .sequences import Sequences


class BatchStreamer(BaseStreamer):
    """
    A streamer for all rows of a batch; transformers' own streamers take a single row. Rows advance by different
    amounts, so each row is streamed by itself.

    ```python
    streamer = hf_ssd.BatchStreamer(lambda row, tokens: print(row, tokenizer.decode(tokens)))
    target.generate(**inputs, streamer=streamer, assistant_model=draft, ssd_config=hf_ssd.SSDConfig())
    ```

    Args:
        on_tokens (`Callable`): Called with the number of a row and its new tokens, a `torch.LongTensor` of shape
            `(count,)` on the CPU. The prompt and the padding of finished rows are not streamed. (Plain `generate()`
            takes this streamer too, and streams the padding.)
        on_end (`Callable`, *optional*): Called without arguments when all rows are done.
    """

    def __init__(self, on_tokens: Callable[[int, torch.LongTensor], None], on_end: Callable[[], None] = lambda: None):
        self.on_tokens, self.on_end = on_tokens, on_end

    def put(self, value: torch.LongTensor) -> None:
        """Plain `generate()` calls this with the prompts first, and then with the next token of each row."""
        if value.dim() == 1:
            for row, token in enumerate(value):
                self.on_tokens(row, token[None])

    def end(self) -> None:
        self.on_end()


class RoundStreamer(BaseStreamer):
    """
    A streamer that reports each round, for a display or for statistics while a call is running.

    ```python
    streamer = hf_ssd.RoundStreamer(lambda stats: print(stats.records[-1:]), TextStreamer(tokenizer))
    target.generate(**inputs, streamer=streamer, assistant_model=draft, ssd_config=hf_ssd.SSDConfig())
    ```

    Args:
        on_round (`Callable`): Called with the [`SSDStats`] of the call after the tokens of a round were streamed. There
            is no record yet after the prefill; later the last record is of this round. Plain `generate()` does not call
            it.
        streamer (`BaseStreamer`, *optional*): Where the tokens go.
    """

    # Set by a subclass: called before a round is streamed with the number of a row, its new tokens, some of which may
    # come after the end of the row, and the raw logits `(new_tokens, vocab_size)` that they were chosen from.
    on_logits: Callable[[int, list[int], torch.Tensor], None] | None = None

    def __init__(self, on_round: Callable[[SSDStats], None], streamer: BaseStreamer | None = None):
        self.on_round, self.streamer = on_round, streamer

    def put(self, value: torch.LongTensor) -> None:
        if self.streamer is not None:
            self.streamer.put(value)

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()


class Stream:
    """Gives the user's streamer the tokens of `sequences` that are certain, each of them once."""

    def __init__(self, streamer: BaseStreamer, sequences: Sequences):
        self.streamer, self.sequences = streamer, sequences
        self.lengths = [sequences.prompt_length] * sequences.batch_size
        self.columns = sequences.prompt_length

    def update(self, stats: SSDStats) -> None:
        if isinstance(self.streamer, BatchStreamer):
            for row, before in enumerate(self.lengths):
                self.lengths[row] = length = self.sequences.settled(row)
                if length > before:
                    self.streamer.on_tokens(row, self.sequences.ids[row, before:length].cpu().clone())
        else:
            before, self.columns = self.columns, self.sequences.settled_columns
            for tokens in self.sequences.as_in_plain_generation(self.columns)[:, before:].cpu().unbind(1):
                self.streamer.put(tokens.clone())  # a copy, which the streamer may change
        if isinstance(self.streamer, RoundStreamer):
            self.streamer.on_round(stats)
