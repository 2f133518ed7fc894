"""OpenAI's penalties for tokens that the answer already has."""

import torch
from transformers import LogitsProcessor


class Penalties(LogitsProcessor):
    """Lowers each token's logit by `frequency` for each time that the answer has it, and by `presence` if it has it."""

    def __init__(self, prompt_length: int, frequency: float, presence: float):
        self.prompt_length, self.frequency, self.presence = prompt_length, frequency, presence

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        answer = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)
