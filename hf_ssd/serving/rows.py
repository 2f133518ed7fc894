"""The rows that a call generates: their texts, stop strings and penalties, and the choices that they are for."""

import asyncio
import itertools
from collections.abc import Iterable, Iterator

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import LogitsProcessor, StoppingCriteria
from transformers.cli.serving.utils import ToolCall, _GenerationCancelled, _StreamError, response_events_to_chunks
from transformers.generation.streamers import BaseStreamer

from .logprobs import Entry, entries
from .parameters import Parameters


class Cut:
    """Returns the part of a text before the first stop string. Text that may begin one is held back until clear."""

    def __init__(self, strings: list[str]):
        self.strings, self.held, self.is_over = strings, "", False
        self.read = self.clear = 0  # characters that were added, and that were returned

    def add(self, piece: str) -> str:
        """Returns the new text that is certain to come before any stop string."""
        if self.is_over:
            return ""
        text, self.held, self.read = self.held + piece, "", self.read + len(piece)
        if found := [text.index(one) for one in self.strings if one in text]:
            self.is_over, text = True, text[: min(found)]
        else:
            sure = (i for i in range(len(text)) if any(one.startswith(text[i:]) for one in self.strings))
            end = next(sure, len(text))
            text, self.held = text[:end], text[end:]
        self.clear += len(text)
        return text

    def release(self) -> str:
        """Returns the text that was held back, once no more text follows."""
        held, self.held = self.held, ""
        return held


class Row:
    """A row of a call: its tokens up to a stop string, and their log-probabilities if they are wanted."""

    def __init__(self, strings: list[str], likely: int | None, tokenizer: Tokenizer):
        self.likely, self.is_read = likely, bool(strings) or likely is not None
        # Answers do not show special tokens, but a stop string may be the name of a special token.
        self.texts = [(Cut(strings), DecodeStream([], skip_special_tokens=skips)) for skips in (True, False)]
        self.tokenizer, self.settled = tokenizer, 0  # number of tokens that are part of the answer
        self.starts: list[list[int]] = []  # for each token that was read, the characters before it in both texts
        self.entries: list[Entry] = []  # of all tokens that were decided, also of those after the end
        self.end: int | None = None  # number of tokens up to the one that completes a stop string

    def add_logits(self, tokens: list[int], logits: torch.Tensor) -> None:
        """Takes in the raw logits `(tokens, vocab_size)` that tokens were chosen from."""
        self.entries += entries(tokens, logits, self.likely)

    def read(self, tokens: list[int], first: int) -> None:
        """Takes in tokens, from number `first` of the row on. Some may have been read before."""
        for token in tokens[len(self.starts) - first :] if self.end is None else ():
            self.starts.append([cut.read for cut, _ in self.texts])
            for cut, decoder in self.texts:
                cut.add(decoder.step(self.tokenizer, token) or "")
            if any(cut.is_over for cut, _ in self.texts):
                self.end = len(self.starts)
                return

    def settle(self, tokens: list[int]) -> list[int]:
        """Returns the part of the row's next tokens that belongs to the answer."""
        if self.is_read:
            self.read(tokens, self.settled)
        # A row that has ended by a stop string goes on if there is no EOS token and other rows go on.
        kept = tokens if self.end is None else tokens[: max(0, self.end - self.settled)]
        self.settled += len(kept)
        return kept

    @property
    def is_over(self) -> bool:
        return self.end is not None and self.end <= self.settled

    def shown(self, count: int | None = None) -> int:
        """Returns how many of the first `count` tokens, by default of all, begin before a stop string."""
        if count is None and not self.is_over:
            return self.settled
        # Those of a `count` begin before any text that may become a stop string, too.
        starts, clear = self.starts[: self.settled if count is None else count], [cut.clear for cut, _ in self.texts]
        hidden = (i for i, place in enumerate(starts) if any(start >= end for start, end in zip(place, clear)))
        return next(hidden, len(starts))


class StopCriteria(StoppingCriteria):
    """Ends each row with the token that completes a stop string in its generated text."""

    # transformers' `StopStringCriteria` compares the names of tokens: it misses characters that are several tokens, and
    # finds strings that begin in the prompt.
    def __init__(self, rows: list[Row], length: int):
        self.rows, self.length, self.seen = rows, length, 0  # of the prompt, and of what rows have read

    def __call__(self, input_ids: torch.LongTensor, scores, **kwargs) -> torch.BoolTensor:
        for row, tokens in zip(self.rows, input_ids[:, self.length + self.seen :].tolist()):
            row.read(tokens, self.seen)
        self.seen = input_ids.shape[1] - self.length
        return torch.tensor([row.end is not None for row in self.rows], device=input_ids.device)


class Penalties(LogitsProcessor):
    """Lowers each token's logit by `frequency` for each time that the answer has it, and by `presence` if it has it."""

    # This is OpenAI's formula.

    def __init__(self, prompt_length: int, frequency: float, presence: float):
        self.prompt_length, self.frequency, self.presence = prompt_length, frequency, presence

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        answer = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Choice(BaseStreamer):
    """Gives transformers' handler the texts and tool calls of a row: as they come in a stream, and else at the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tokenizer: Tokenizer, parameters: Parameters, parser=None):
        self.loop, self.tokenizer, self.parser, self.queue = loop, tokenizer, parser, asyncio.Queue()
        self.is_streamed, self.cut, self.kind = parameters.stream, Cut(parameters.stops()), str
        self.decoder, self.tokens, self.length = DecodeStream([], skip_special_tokens=parser is None), [], 0
        self.items = [] if parser is None else response_events_to_chunks(parser.initial_events)  # that are not sent
        self.marks: list[int | None] = []  # for each item that was sent, the tokens that it and those before it show
        self.is_over = False

    @property
    def total_tokens(self) -> int:
        """Read by the handler."""
        return len(self.tokens)

    def cancel(self) -> None:
        """Called by the handler if the client leaves, which [`CountingStreamer`] sees."""

    def put(self, value: torch.LongTensor) -> None:
        for token in value.tolist() if value.dim() == 1 else ():  # the prompt has two dimensions
            self.tokens.append(token)
            self._read(self.decoder.step(self.tokenizer, token) or "")
            if self.is_streamed:
                self._send(self._cut())

    def end(self) -> None:
        self.is_over = True
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=self.parser is None)
        self._read(text[self.length :] if text.endswith("\ufffd") else "")  # the decoder waits for whole characters
        if self.parser is not None:
            self.items += response_events_to_chunks(self.parser.finalize())
        items = self._cut()
        if not self.is_streamed:
            items = joined_texts(items, self.parser is not None and not self.parser.is_raw)
        self._send(items)
        self.loop.call_soon_threadsafe(self.queue.put_nowait, None)

    def fail(self, error: Exception) -> None:
        """Ends an answer that has failed, in a stream with the error unless its client has left."""
        is_told = self.is_streamed and not isinstance(error, _GenerationCancelled)
        self.loop.call_soon_threadsafe(self.queue.put_nowait, _StreamError(str(error)) if is_told else None)

    def _read(self, text: str) -> None:
        self.length += len(text)
        if text:
            self.items += [text] if self.parser is None else response_events_to_chunks(self.parser.feed(text))

    def _cut(self) -> Iterator[str | ToolCall]:
        """Yields the new items before a stop string, which does not span two fields."""
        for item in self.items:
            if type(item) is not self.kind:
                yield self.kind(self.cut.release())
            if isinstance(item, str):
                self.kind = type(item)
                item = self.kind(self.cut.add(item))
            yield item
        self.items = []
        if self.is_over:
            yield self.kind(self.cut.release())

    def _send(self, items: Iterable[str | ToolCall]) -> None:
        for item in filter(None, items):
            self.marks.append(None if self.is_over else len(self.tokens))
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


def joined_texts(items: list[str | ToolCall], is_stripped: bool) -> Iterator[str | ToolCall]:
    """Yields tool calls, and the texts between them, which transformers strips where an answer is not streamed."""
    for kind, group in itertools.groupby(items, type):
        if issubclass(kind, str):
            text = "".join(group)
            yield kind(text.strip() if is_stripped else text)
        else:
            yield from group
