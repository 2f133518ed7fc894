"""A call as the draft knows it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import GenerationConfig

from ..cache.kept_prefixes import KeptPrefixes
from ..config import SSDConfig
from ..rounds import AHEAD, Plan
from .vocabulary import Translation


@dataclass
class SessionRequest:
    """The part of a generate() call that the draft needs to know. The last three fields do not travel to a worker."""

    config: SSDConfig
    generation_config: GenerationConfig  # the one that transformers prepared, `max_length` included
    prompts: list[torch.LongTensor]  # without padding, at least one token each; empty for rows that join later
    seed: int
    vocab_size: int  # of the target
    translation: Translation | None = None  # from the target's tokens to the draft's, if their tokenizers differ
    plan: Plan = Plan(AHEAD, 1, 1, 1)  # until the first outcome arrives
    worker_index: int = 0
    num_workers: int = 1  # drafts that prepare a budget each
    prompt_length: int | None = None  # of the longest prompt, without tokens from before the draft
    weights_version: int = 0  # the worker drops keys and values that it computed with another one
    has_half: bool = False  # whether the draft has half of the CPU cores
    keep_prefixes: int = 0  # bytes of texts that the draft keeps in running batches
    head: object = None  # a fallback that reads hidden states of the target
    kept: KeptPrefixes | None = None  # these texts, of a draft in this process
    forced: Callable[[int, list[int]], list[int]] | None = None  # the tokens that must follow a row's new tokens

    def __post_init__(self):
        if self.prompt_length is None:
            self.prompt_length = max(map(len, self.prompts))
