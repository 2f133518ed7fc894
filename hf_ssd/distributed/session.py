"""The draft as the target sees it, for the length of one generate() call."""

import copy
import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from transformers import GenerationConfig

from ..config import SSDConfig
from .messages import ProtocolError

# Settings that shape no proposal; some of them are objects.
NOT_FOR_THE_DRAFT = ("compile_config", "cache_config", "watermarking_config", "continuous_batching_config")


MOST_WORKERS = 1024


class DraftError(RuntimeError):
    """The draft worker died, hung, raised, or sent something that makes no sense."""


@dataclass
class SessionRequest:
    """
    What the draft needs to know of a generate() call.

    Args:
        config (`SSDConfig`): The user's settings.
        generation_config (`GenerationConfig`): As transformers prepared it, `max_length` included.
        prompts (`list[torch.LongTensor]`): The prompt of each row without padding.
        seed (`int`): Seed of the draft's randomness.
        asks_target (`bool`, *optional*): Whether the fallback is an object in the target's process.
        share (`tuple[int, int]`, *optional*): Which of how many workers is asked; each prepares its share.
        prompt_length (`int`, *optional*): Of the longest row, without what was generated before the draft was there.
            Defaults to that of the prompts.
    """

    config: SSDConfig
    generation_config: GenerationConfig
    prompts: list[torch.LongTensor]
    seed: int
    asks_target: bool | None = None
    share: tuple[int, int] = (0, 1)
    prompt_length: int | None = None

    def __post_init__(self):
        if self.prompt_length is None:
            self.prompt_length = max(map(len, self.prompts))
        if self.asks_target is None:
            self.asks_target = not isinstance(self.config.fallback, str)

    def to_dict(self) -> dict:
        """Returns everything except the prompts as plain Python objects that JSON can hold."""
        # What transformers keeps under names with an underscore are tensors it derives anew on each side.
        generation_config = copy.copy(self.generation_config)
        vars(generation_config).update(as_plain_objects(vars(generation_config)))
        settings = {k: v for k, v in generation_config.to_diff_dict().items() if not k.startswith("_")}
        for name in NOT_FOR_THE_DRAFT:
            settings.pop(name, None)
        if isinstance(settings.get("sequence_bias"), dict):  # transformers takes it as pairs too, which JSON can hold
            settings["sequence_bias"] = [[list(tokens), bias] for tokens, bias in settings["sequence_bias"].items()]
        config = self.config
        if self.asks_target:  # an object does not travel: the draft is to ask for its proposals
            config = dataclasses.replace(config, fallback="primary")
        return {
            "ssd_config": config.to_dict(),
            "generation_config": as_plain_objects(settings),
            "seed": self.seed,
            "asks_target": self.asks_target,
            "share": list(self.share),
            "prompt_length": self.prompt_length,
        }

    @classmethod
    def from_dict(cls, values: dict, prompts: list[torch.LongTensor]) -> "SessionRequest":
        """
        Raises:
            [`~hf_ssd.distributed.messages.ProtocolError`]: it is not what [`~SessionRequest.to_dict`] gives.
        """
        try:
            generation_config = GenerationConfig.from_dict(values["generation_config"])
            config = SSDConfig.from_dict(values["ssd_config"])
            seed, asks_target, (index, count) = values["seed"], values["asks_target"], values["share"]
            prompt_length = values["prompt_length"]
        except Exception as error:  # transformers raises whatever a value of the wrong type leads to
            raise ProtocolError(f"a call cannot be read: {type(error).__name__}: {error}") from error
        whole = all(type(number) is int for number in (seed, index, count, prompt_length))
        if not whole or not (0 <= seed < 2**31 and 0 <= index < count <= MOST_WORKERS) or type(asks_target) is not bool:
            raise ProtocolError(f"a call cannot have seed {seed!r}, share {index!r} of {count!r}, asks {asks_target!r}")
        return cls(config, generation_config, prompts, seed, asks_target, (index, count), prompt_length)


def as_plain_objects(value):
    """Returns the same with tensors and the arrays and numbers of numpy, which users give too, as plain Python."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {key: as_plain_objects(of_key) for key, of_key in value.items()}
    return [as_plain_objects(one) for one in value] if isinstance(value, (list, tuple)) else value


@dataclass
class Answer:
    """
    What the draft answers to an outcome.

    Args:
        tokens (`torch.LongTensor` of shape `(batch_size, lookahead)`): The drafted tokens.
        hits (`torch.BoolTensor` of shape `(batch_size,)`): Whether each row's outcome had been prepared.
        draft_seconds (`float`): How long the draft has worked since its last answer.
        answer_seconds (`float`): How much of that came after the outcome.
        budget (`int`): Outcomes that had been prepared for each row.
        prepared_at, answered_at (`float`): When the draft began to prepare, and to answer, by `time.perf_counter()`,
            which all processes of a machine share. 0 if it did not.
        rest (`int`): How many rounds after this one the draft need not be asked: it would propose nothing.
    """

    tokens: torch.LongTensor
    hits: torch.BoolTensor
    draft_seconds: float = 0.0
    answer_seconds: float = 0.0
    budget: int = 0
    prepared_at: float = 0.0
    answered_at: float = 0.0
    rest: int = 0


class DraftSession(ABC):
    """
    One generate() call's conversation with the draft. A round is `send_outcome`, `receive_speculation`, and when
    sampling `receive_probabilities`, in this order. Round 0's outcome is the first token after the
    prompt; rows that are finished already are told as in any other round.

    Each method may raise [`DraftError`], and is not called again after it did.
    """

    @abstractmethod
    def send_outcome(self, accepted: torch.LongTensor, bonus: torch.LongTensor, seconds: float, verified: int) -> None:
        """
        Tells the draft what was decided. Returns at once.

        Args:
            accepted (`torch.LongTensor` of shape `(batch_size,)`): Accepted count of each row; -1 if it is finished.
            bonus (`torch.LongTensor` of shape `(batch_size,)`): The token that follows.
            seconds (`float`): How long verification took; 0 for the first outcome, which has none.
            verified (`int`): How many drafted tokens it looked at. Fewer than were received where the limit is near.
        """

    @abstractmethod
    def receive_speculation(self) -> Answer:
        """Returns the next speculation. If it has no tokens, no probabilities follow."""

    @abstractmethod
    def receive_probabilities(self) -> torch.FloatTensor | None:
        """
        Returns the distributions `(batch_size, lookahead, vocab_size)` that the tokens were drawn from, or `None` if
        they are lost. Then the tokens do not count.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the conversation. Called once, whatever happened before."""
