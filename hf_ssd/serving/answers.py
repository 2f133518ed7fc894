"""Reads tool calls and reasoning in an answer. The raw text of a tool call that cannot be read becomes content."""

import bisect
import copy
import re

from transformers.utils.chat_parsing import ResponseParser

from .parameters import ToolCall


class LenientParser:
    """A `ResponseParser` to which the raw text from the first tool call on that cannot be read is content."""

    def __init__(self, parser: ResponseParser, special_tokens: list[str]):
        self.parser, self.unused, self.initial_events = parser, copy.deepcopy(parser), parser.initial_events
        self.special = re.compile("|".join(map(re.escape, special_tokens)) or "(?!)")
        self.text, self.shown, self.is_raw = "", 0, False

    def feed(self, text: str) -> list[dict]:
        self.text += text
        return self._content(text) if self.is_raw else self._tried(lambda: self.parser.feed(text))

    def finalize(self) -> list[dict]:
        return [] if self.is_raw else self._tried(lambda: self.parser.finalize()[1])

    def _tried(self, step) -> list[dict]:
        try:
            events = step()
            for call in calls(events):
                ToolCall.model_validate(call)
        except Exception:  # whatever a model writes must not end its answer
            self.is_raw = True
            # The shortest beginning of the answer that shows what was shown ends before the tool call's own mark.
            end = bisect.bisect_left(range(len(self.text) + 1), self.shown, key=self._shown_by)
            return self._content(self.text[end:])
        self.shown += shown(events)
        return events

    def _shown_by(self, length: int) -> float:
        try:
            return shown(copy.deepcopy(self.unused).feed(self.text[:length]))
        except Exception:  # the tool call that cannot be read is part of it
            return float("inf")

    def _content(self, text: str) -> list[dict]:
        text = self.special.sub("", text)
        return [{"type": "region_chunk", "field": "content", "text": text, "dirty": False}] if text else []


def calls(events: list[dict]) -> list:
    """Returns the tool calls that are complete."""
    return [event["value"] for event in events if event["type"] == "region_close" and event["field"] == "tool_calls"]


def shown(events: list[dict]) -> int:
    """Returns a measure of what clients are shown, which grows with the answer."""
    texts = (event["text"] for event in events if event["type"] == "region_chunk" and not event["dirty"])
    return sum(map(len, texts)) + len(calls(events))
