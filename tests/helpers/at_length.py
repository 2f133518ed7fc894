"""A logits processor that does something in the middle of a call."""

from transformers import LogitsProcessor


class AtLength(LogitsProcessor):
    """Calls a function once, when the output has reached a length."""

    def __init__(self, length, action):
        self.length, self.action = length, action

    def __call__(self, input_ids, scores):
        if self.action is not None and input_ids.shape[1] >= self.length:
            action, self.action = self.action, None
            action()
        return scores
