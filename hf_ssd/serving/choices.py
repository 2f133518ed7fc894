"""Joins the answers to several prompts of one request into one answer with a choice for each prompt."""


class Choices:
    """Numbers the choices, and gives the sum of the usage."""

    def __init__(self, count: int):
        self.count, self.usage = count, {}

    def joined(self, answers: list[dict]) -> dict:
        """Returns the answer whose choices are those of whole answers."""
        for index, answer in enumerate(answers):
            self.number(answer, index)
        return {**answers[-1], "choices": [choice for answer in answers for choice in answer["choices"]]}

    def number(self, answer: dict, index: int) -> None:
        """Numbers the choice of an answer or event. The last usage is that of all answers, and the only one."""
        if self.count == 1:
            return
        for choice in answer.get("choices", ()):
            choice["index"] = index
        for name, tokens in (answer.pop("usage", None) or {}).items():
            self.usage[name] = self.usage.get(name, 0) + tokens
            if index == self.count - 1:
                answer["usage"] = self.usage
