"""Events for the page: a text as it is generated, the origin of each token, and the timeline of both sides."""

import asyncio
import copy
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Literal

import torch
from pydantic import BaseModel, Field
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from .. import timeline
from ..generation.streaming import RoundStreamer
from ..rounds import PREPARED
from ..stats import SSDStats
from .calls import CALL, Call, CallRunner
from .errors import described
from .metrics import Totals
from .parameters import Parameters

LONGEST = 200_000  # characters of a text


class Turn(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str = Field(max_length=LONGEST)


class LiveRequest(BaseModel):
    """A text to continue, or for models with a chat template a message, which follows those of `history`."""

    prompt: str = Field(min_length=1, max_length=LONGEST)
    history: list[Turn] = Field([], max_length=1000)
    max_new_tokens: int = Field(200, ge=1, le=4096)
    temperature: float = Field(0.0, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    seed: int | None = Field(None, ge=0, lt=2**64)
    draft: bool = True  # whether to speculate


class LiveStreamer(RoundStreamer):
    """Turns rounds, or single tokens if the request does not speculate, into events for `send`."""

    def __init__(self, tokenizer: Tokenizer, text: list[int], send: Callable, others: Callable, speculates: bool):
        super().__init__(self._add_round)
        self.tokenizer, self.send, self.speculates = tokenizer, send, speculates
        self.others = others  # returns how many answers are written beside it
        # The answer goes on where the text ends: some tokenizers drop the space in front of a text.
        self.decoder, self.waiting = DecodeStream(text, skip_special_tokens=True), []
        self.totals, self.start = Totals(), time.perf_counter()

    def put(self, value: torch.LongTensor) -> None:
        if value.dim() > 1:  # the prompt
            self.start = time.perf_counter()
            return
        self.totals.tokens += len(value)
        self.waiting += [self.decoder.step(self.tokenizer, token) or "" for token in value.tolist()]
        if not self.speculates:
            self._send(["target"] * len(self.waiting))

    def _add_round(self, stats: SSDStats) -> None:
        self.totals.add_round(stats)
        record = stats.records[-1] if stats.records else None
        of_the_draft = "prepared" if record and record.sources[0] == PREPARED else "drafted"
        count = max(0, record.accepted[0]) if record else 0
        origins = [of_the_draft if i < count else "target" for i in range(len(self.waiting))]
        if record and record.took_sibling(0) and count <= len(origins):
            origins[count - 1] += " sibling"
        intervals = timeline.intervals(SSDStats(records=[record]))[1:] if record else []
        self._send(
            origins,
            **self.totals.ratios,
            nodes=self.totals.nodes,
            siblings=self.totals.siblings,
            intervals=[[one.side, one.what, one.start, one.end] for one in intervals],
            label=timeline.label(record) if record else "",
        )

    def _send(self, origins: list[str], **more) -> None:
        seconds = time.perf_counter() - self.start
        texts, self.waiting = self.waiting, []
        more |= {"count": self.totals.tokens, "seconds": seconds, "others": self.others()}
        self.send({"tokens": list(zip(texts, origins)), **more})


async def events(request: LiveRequest, calls: CallRunner) -> AsyncIterator[str]:
    """Yields `{"reading": tokens}`, an event a round or token, and `{"end": reason}` or `{"error": sentence}`."""
    call, queue = CALL.get(), asyncio.Queue()
    call.parameters = Parameters(seed=request.seed)

    def send(event: dict) -> None:
        call.loop.call_soon_threadsafe(queue.put_nowait, event)

    calls.submit(_generate, request, calls, call, send)
    event = {}
    while not {"end", "error"} & event.keys():
        event = await queue.get()
        yield f"data: {json.dumps(event)}\n\n"


def _generate(request: LiveRequest, calls: CallRunner, call: Call, send: Callable) -> None:
    model, tokenizer = calls.limits.model, calls.limits.tokenizer
    config, text = copy.deepcopy(model.generation_config), []
    config.update(max_new_tokens=request.max_new_tokens, do_sample=request.temperature > 0)
    config.update(temperature=request.temperature or 1.0, top_p=request.top_p or config.top_p)
    without_draft = {} if request.draft else {"ssd_config": None}
    try:
        if tokenizer.chat_template is None:
            inputs = tokenizer(request.prompt, return_tensors="pt")
            text = inputs["input_ids"][0].tolist()
        else:
            messages = [*(turn.model_dump() for turn in request.history), {"role": "user", "content": request.prompt}]
            options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
            inputs = tokenizer.apply_chat_template(messages, **options)
        inputs = inputs.to(model.device)
        calls.prepare(inputs, config, call)
        send({"reading": inputs["input_ids"].shape[1]})
        streamer = LiveStreamer(tokenizer.backend_tokenizer, text, send, calls.others, request.draft)
        calls.generate(call, [streamer], **inputs, generation_config=config, **without_draft)
        send({"end": "finished"})
    except Exception as error:
        send({"error": described(error)[1]["error"]["message"]})
