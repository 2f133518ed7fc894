"""Joins the answers to several prompts of one request into one answer with a choice for each prompt."""

import json


class Choices:
    """Numbers the choices, and gives the sum of the usage."""

    def __init__(self, count: int):
        self.count, self.usage = count, {}

    def joined(self, answers: list[dict]) -> dict:
        """Returns the answer whose choices are those of whole answers."""
        for index, answer in enumerate(answers):
            self._number(answer, index)
        return {**answers[-1], "choices": [choice for answer in answers for choice in answer["choices"]]}

    def events(self, chunk: str, index: int) -> str:
        """Returns the events of a streamed answer to the prompt with this index."""
        found = [json.loads(line.removeprefix("data: ")) for line in filter(None, chunk.split("\n\n"))]
        for event in found:
            self._number(event, index)
        return "".join(f"data: {json.dumps(event)}\n\n" for event in found)

    def _number(self, answer: dict, index: int) -> None:
        """Numbers the choice of an answer or event. The last usage is that of all answers, and the only one."""
        for choice in answer.get("choices", ()):
            choice["index"] = index
        for name, tokens in (answer.pop("usage", None) or {}).items():
            self.usage[name] = self.usage.get(name, 0) + tokens
            if index == self.count - 1:
                answer["usage"] = self.usage
