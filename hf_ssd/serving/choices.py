"""The choices of an answer as clients get them: numbered, without stop strings, with prompts and log-probabilities."""

from .calls import Call
from .logprobs import Entry, Names
from .stops import StreamCut, cut_answer


def with_cached(answer: dict, cached: int) -> dict:
    """Returns an answer or event whose usage, if it has any, says how many tokens of the prompt were not read again."""
    usage = answer.get("usage") or (answer.get("response") or {}).get("usage") or {}
    if "prompt_tokens" in usage:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    elif "input_tokens_details" in usage:
        usage["input_tokens_details"]["cached_tokens"] = cached
    return answer


class Choices:
    """Joins the answers to the prompts of a request: numbers their choices, and sums their usage."""

    def __init__(self, prompts: int, count: int):
        self.prompts, self.count, self.usage, self.left = prompts, count, {}, prompts * count
        self.cached = 0

    def number(self, answer: dict, prompt: int, choice: int) -> None:
        """
        Numbers the choice of an answer or event. The last usage is that of all answers, and the only one. It has the
        tokens of each prompt once.
        """
        if self.prompts * self.count == 1:
            return
        for one in answer.get("choices", ()):
            one["index"] = prompt * self.count + choice
        usage = answer.pop("usage", None)
        if usage is None:
            return
        self.left -= 1
        for name in ("prompt_tokens", "completion_tokens"):
            tokens = 0 if choice and name == "prompt_tokens" else usage[name]
            self.usage[name] = self.usage.get(name, 0) + tokens
        self.cached += 0 if choice else usage["prompt_tokens_details"]["cached_tokens"]
        if self.left == 0:
            answer["usage"] = {**self.usage, "total_tokens": sum(self.usage.values())}
            with_cached(answer, self.cached)


class ShownChoice:
    """A choice of the answer to a prompt, whole or as the events of a stream."""

    def __init__(self, call: Call, prompt: int, index: int, names: Names):
        self.call, self.index, self.names, self.parameters = call, index, names, call.parameters
        self.cut, self.items, self.sent = StreamCut(self.parameters.stops()), 0, 0
        self.prompt: str | None = None  # that is to stand before the text
        if self.parameters.echoes():
            text = self.parameters.prompts()[prompt]
            self.prompt = text if isinstance(text, str) else names.tokenizer.decode(text, skip_special_tokens=True)
        self.before = len(self.prompt or "")

    def whole(self, answer: dict) -> dict:
        """Returns an answer that is not streamed as the client gets it."""
        row = self.call.row(self.index)
        answer = cut_answer(answer, self.parameters.stops(), row.is_over)
        (choice,) = answer["choices"]
        if self.prompt is not None:
            choice["text"] = self.prompt + choice["text"]
        if self.parameters.likely() is not None:
            choice["logprobs"] = self._logprobs(self.call.of_prompt, 0, row.shown())
        return answer

    def events(self, event: dict) -> list[dict]:
        """Returns the events that the client gets in place of an event of transformers' handler."""
        choice = next(iter(event.get("choices", ())), None)
        if choice is None:
            return self.cut.events(event)
        first, is_last = [], choice.get("finish_reason") is not None
        if self.prompt is not None:
            of_prompt = {"index": choice["index"], "text": self.prompt}
            if self.call.of_prompt:
                of_prompt["logprobs"] = self._logprobs(self.call.of_prompt, 0, 0)
            first = [{**event, "choices": [of_prompt]}]
            first[0].pop("usage", None)
            self.prompt = None
        self.items += not is_last and "role" not in choice.get("delta", ())
        sent = self.cut.events(event)
        if self.parameters.likely() is not None and sent:
            for one in sent:  # an event may be sent again, with text that was held back
                one["choices"][0].pop("logprobs", None)
            mark = self.call.choices[self.index].marks[self.items - 1] if self.items else 0
            row = self.call.row(self.index) if is_last or mark else None
            count = row.shown(None if is_last else mark) if row else 0
            if count > self.sent:
                last = sent[0 if is_last else -1]["choices"][0]
                last["logprobs"], self.sent = self._logprobs([], self.sent, count), count
        return [*first, *sent]

    def _logprobs(self, of_prompt: list[Entry], start: int, stop: int) -> dict:
        """Returns those of the prompt, and of some tokens after it."""
        row = self.call.row(self.index)
        entries = [*of_prompt, *row.entries[start:stop]]
        if not hasattr(self.parameters, "echo"):
            return self.names.in_chat(entries)
        offsets = self.names.offsets([one.token for one in of_prompt])
        return self.names.in_completion(entries, [*offsets, *(self.before + one[0] for one in row.starts[start:stop])])
