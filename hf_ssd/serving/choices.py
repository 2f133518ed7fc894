"""The choices of an answer as clients get them: numbered, with prompts and log-probabilities, streamed or whole."""

from .calls import Call
from .logprobs import Entry, Names

TEXTS = ("text", "content", "reasoning_content")  # fields of a choice


class ShownChoice:
    """A choice of the answer to a prompt, as the events that a client gets."""

    def __init__(self, call: Call, prompt: int, index: int, names: Names):
        self.call, self.index, self.names, self.parameters = call, index, names, call.parameters
        self.number = prompt * call.parameters.get("n", 1) + index  # among the choices of all prompts
        self.items = self.sent = 0  # pieces of the answer, and tokens with log-probabilities
        self.prompt: str | None = None  # that is to stand before the text
        if self.parameters.get("echo"):
            text = self.parameters.prompts()[prompt]
            self.prompt = text if isinstance(text, str) else names.tokenizer.decode(text, skip_special_tokens=True)
        self.before = len(self.prompt or "")

    def events(self, event: dict) -> list[dict]:
        """Returns the events that the client gets in place of an event of transformers' handler."""
        self._add_usage(event)
        choice = next(iter(event.get("choices", ())), None)
        if choice is None:
            return [event]
        choice["index"] = self.number
        first, is_last, mark = [], choice.get("finish_reason") is not None, None
        if self.prompt is not None:
            of_prompt = {"index": choice["index"], "text": self.prompt}
            if self.call.of_prompt:
                of_prompt["logprobs"] = self._logprobs(self.call.of_prompt, 0, 0)
            first = [{**event, "choices": [of_prompt]}]
            first[0].pop("usage", None)
            self.prompt = None
        if is_last:
            if choice["finish_reason"] == "length" and self.call.row(self.index).is_over:
                choice["finish_reason"] = "stop"  # the last possible token completed a stop string
        else:
            self.items += "role" not in choice.get("delta", ())
            mark = self.call.choices[self.index].marks[self.items - 1] if self.items else 0
        if self.parameters.likely() is not None and mark != 0:
            count = self.call.row(self.index).shown(mark)
            if count > self.sent or (is_last and not self.parameters.stream):  # a whole answer has them, if empty
                choice["logprobs"], self.sent = self._logprobs([], self.sent, count), count
        return [*first, event]

    def _add_usage(self, event: dict) -> None:
        """Leaves the last usage alone, which becomes that of all choices. It has the tokens of each prompt once."""
        usage, call = event.get("usage") or (event.get("response") or {}).get("usage") or {}, self.call
        if "input_tokens_details" in usage:  # of `/v1/responses`
            usage["input_tokens_details"]["cached_tokens"] = call.cached
        if "prompt_tokens" not in usage:
            return
        del event["usage"]
        call.usage["completion_tokens"] += usage["completion_tokens"]
        call.usage["prompt_tokens"] += usage["prompt_tokens"] if self.index == 0 else 0
        call.answered += 1
        if call.answered == len(call.prompts) * self.parameters.get("n", 1):
            details = {"prompt_tokens_details": {"cached_tokens": call.cached}}
            event["usage"] = {**call.usage, "total_tokens": call.usage.total(), **details}

    def _logprobs(self, of_prompt: list[Entry], start: int, stop: int) -> dict:
        """Returns those of the prompt, and of some tokens after it."""
        row = self.call.row(self.index)
        entries = [*of_prompt, *row.entries[start:stop]]
        if not hasattr(self.parameters, "echo"):
            return self.names.in_chat(entries)
        offsets = self.names.offsets([one.token for one in of_prompt])
        return self.names.in_completion(entries, [*offsets, *(self.before + one[0] for one in row.starts[start:stop])])


def whole(events: list[dict]) -> dict:
    """Returns the answer that the events of a stream make."""
    *_, last = events
    if "response" in last:  # of `/v1/responses`, whose last event has all of it
        return last["response"]
    choices: dict[int, dict] = {}
    for event in events:
        for part in event["choices"]:
            index = part["index"]
            join(choices.setdefault(index, {"index": index}), part)
    is_chat = last["object"] == "chat.completion.chunk"
    for choice in choices.values() if is_chat else ():
        choice["message"] = {"content": "", **choice.pop("delta")}
        for call in choice["message"].get("tool_calls", ()):
            del call["index"]
    last.pop("system_fingerprint", None)
    return {**last, "object": last["object"].removesuffix(".chunk"), "choices": [choices[i] for i in sorted(choices)]}


def join(choice: dict, part: dict) -> None:
    """Adds a part of a choice to those before it: texts and lists go on, and of other values the last one counts."""
    for name, value in part.items():
        if isinstance(value, dict):
            join(choice.setdefault(name, {}), value)
        elif isinstance(value, list):
            choice.setdefault(name, []).extend(value)
        elif isinstance(value, str) and name in TEXTS:
            choice[name] = choice.get(name, "") + value
        else:
            choice[name] = value
