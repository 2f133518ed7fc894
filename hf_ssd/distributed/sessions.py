"""The draft as the target sees it, for the length of one generate() call."""

import copy
import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import GenerationConfig

from ..config import SSDConfig
from ..drafting.vocabulary import Translation
from ..rounds import AHEAD, IN_TURN, MTP, Outcome, Plan, Speculation
from . import payloads, wire
from .transport import AWAKE, PeerLost
from .wire import FLAG, PLAN, Field, Kind, Message, ProtocolError

# Settings that do not affect proposals; some of them are objects.
NOT_FOR_THE_DRAFT = ("compile_config", "cache_config", "watermarking_config", "continuous_batching_config")
MOST_WORKERS, MOST_TOKENS = 1024, 2**22
REQUEST = {  # fields of a call that are numbers
    "seed": Field(0, 2**31 - 1),
    "vocab_size": Field(1, MOST_TOKENS),
    "worker_index": Field(0, MOST_WORKERS - 1),
    "num_workers": Field(1, MOST_WORKERS),
    "prompt_length": Field(),
    "weights_version": Field(),
    "asks_target": FLAG,
}


class DraftError(RuntimeError):
    """The draft worker died, hung, raised, or sent something that makes no sense."""


@dataclass
class SessionRequest:
    """
    The part of a generate() call that the draft needs to know.

    `generation_config` is the one that transformers prepared, `max_length` included, and `prompts` are without padding.
    `translation` leads from the target's tokens to the draft's, if their tokenizers differ. `asks_target` says that the
    fallback is an object in the target's process: the user's, or the `head` of `fallback="mtp"`, which is not sent.
    `plan` holds until the first outcome arrives. `prompt_length` is that of the longest prompt without tokens that were
    generated before the draft was ready. The worker drops keys and values that it computed with another
    `weights_version`.
    """

    config: SSDConfig
    generation_config: GenerationConfig
    prompts: list[torch.LongTensor]
    seed: int
    vocab_size: int
    translation: Translation | None = None
    plan: Plan = Plan(AHEAD, 1, 1, 1)
    asks_target: bool | None = None
    worker_index: int = 0
    num_workers: int = 1
    prompt_length: int | None = None
    weights_version: int = 0
    head: object = None

    def __post_init__(self):
        if self.prompt_length is None:
            self.prompt_length = max(map(len, self.prompts))
        if self.asks_target is None:
            self.asks_target = not isinstance(self.config.fallback, str) or self.config.fallback == MTP

    def to_dict(self) -> dict:
        """Returns everything except the prompts as plain Python objects that JSON can hold."""
        # Values under names with an underscore are tensors that transformers derives anew on each side.
        generation_config = copy.copy(self.generation_config)
        vars(generation_config).update(as_plain_objects(vars(generation_config)))
        known = vars(GenerationConfig()).keys() - {*NOT_FOR_THE_DRAFT}  # attributes of the user's own can be anything
        settings = {k: v for k, v in generation_config.to_diff_dict().items() if k in known and not k.startswith("_")}
        if isinstance(settings.get("sequence_bias"), dict):  # transformers also accepts pairs, which JSON can hold
            settings["sequence_bias"] = [[list(tokens), bias] for tokens, bias in settings["sequence_bias"].items()]
        config = self.config
        if self.asks_target:  # an object cannot be sent: the target asks it for proposals
            config = dataclasses.replace(config, fallback="primary")
        return {
            "ssd_config": config.to_dict(),
            "generation_config": as_plain_objects(settings),
            "is_translated": self.translation is not None,
            "plan": wire.write_fields(PLAN, self.plan),
            "numbers": wire.write_fields(REQUEST, self),
        }

    @classmethod
    def from_dict(
        cls, values: dict, prompts: list[torch.LongTensor], translation: Translation | None = None
    ) -> "SessionRequest":
        """Reads a call, or raises [`ProtocolError`]. `translation` is the last translation that came, if any."""
        try:
            generation_config = GenerationConfig.from_dict(values["generation_config"])
            config = SSDConfig.from_dict(values["ssd_config"])
            plan, numbers, is_translated = (values[name] for name in ("plan", "numbers", "is_translated"))
        except Exception as error:  # transformers may raise any exception for a value of the wrong type
            raise ProtocolError(f"a call cannot be read: {type(error).__name__}: {error}") from error
        plan, numbers = wire.read_plan(plan), wire.read_fields(REQUEST, numbers, "a call")
        vocab_size = numbers["vocab_size"]
        if numbers["worker_index"] >= numbers["num_workers"] or type(is_translated) is not bool:
            raise ProtocolError(f"a call cannot have {numbers}, or be translated: {is_translated!r:.100}")
        if is_translated and (translation is None or len(translation.pieces) != vocab_size):
            raise ProtocolError(f"a call translates {vocab_size} tokens, and no such translation came before it")
        if max(int(prompt.max()) for prompt in prompts) >= vocab_size:
            raise ProtocolError(f"a prompt has tokens that are not in the vocabulary of {vocab_size}")
        translation = translation if is_translated else None
        return cls(config, generation_config, prompts, translation=translation, plan=plan, **numbers)


def as_plain_objects(value):
    """Returns `value` with tensors, and numpy arrays and numbers, which users pass too, as plain Python objects."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {key: as_plain_objects(of_key) for key, of_key in value.items()}
    return [as_plain_objects(one) for one in value] if isinstance(value, (list, tuple)) else value


class DraftSession(ABC):
    """
    The conversation with the draft in a generate() call. A round is `send_outcome`, `receive_speculation`, and when
    sampling `receive_probabilities`, in this order. The outcome of round 0 is the first token after the prompt. Rows
    that are already finished are marked in it as in any other round.

    Each method may raise [`DraftError`], and is not called again after an error. `takes_proposals` says whether
    outcomes may come with tokens that the target's process proposes.
    """

    takes_proposals = True

    @abstractmethod
    def send_outcome(self, outcome: Outcome, plan: Plan, features: torch.Tensor | None = None) -> None:
        """
        Tells the draft which tokens were decided since its last answer, and how to answer and prepare now. Returns at
        once. `features` are the target's hidden states `(tokens, width)` at the tokens that the draft has none for, row
        after row.
        """

    @abstractmethod
    def receive_speculation(self) -> Speculation:
        """
        Returns the next speculation, without probabilities. If it has no tokens, no probabilities follow. Rows that the
        target's process proposes for have none. If the plan names a proposer there, rows that missed have none either:
        their source is `NOTHING`, and `send_proposals` must follow.
        """

    @abstractmethod
    def send_proposals(self, tokens: list[list[int]], sources: list[str]) -> None:
        """Tells the draft which tokens are verified after rows have missed, and their sources. Returns at once."""

    @abstractmethod
    def receive_probabilities(self) -> torch.FloatTensor | None:
        """
        Returns the distributions `(batch_size, lookahead, vocab_size)` that the tokens were drawn from, or `None` if
        they are lost. In that case none of the tokens may be accepted.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the conversation. Called once, whatever happened before."""


class WorkerSession(DraftSession):
    """
    A call with a single worker at rest. Sends and receives with a deadline, drops late messages, and knows whether the
    worker can be used again. `on_close` is called once, when the worker is at rest again or has ended.
    """

    def __init__(self, worker, number: int, request: SessionRequest, on_close: Callable[[], None] = lambda: None):
        self.worker, self.number, self.timeout, self.on_close = worker, number, request.config.timeout, on_close
        self.rows, self.vocab_size, self.round = len(request.prompts), request.vocab_size, -1
        self.is_reusable, self.is_alone = True, request.num_workers == 1
        worker.channel.make_room(self.rows, self.vocab_size)
        send = worker.channel.send
        if request.translation is not None and worker.translation is not request.translation:
            send(Message(Kind.VOCABULARY, payload=request.translation.to_tensor()))
            worker.translation = request.translation
        send(Message(Kind.START, number, payload=payloads.write_json(request.to_dict())))
        send(Message(Kind.PROMPTS, number, payload=payloads.write_prompts(request.prompts)))

    def send_outcome(self, outcome: Outcome, plan: Plan, features: torch.Tensor | None = None) -> None:
        self.round += 1
        self.worker.channel.awake = 0.0 if plan.mode == IN_TURN and self.worker.takes_our_cores else AWAKE
        self._send(Kind.OUTCOME, wire.write_outcome(outcome, plan), features)

    def send_proposals(self, tokens: list[list[int]], sources: list[str], width: int | None = None) -> None:
        """With a `width`, also asks a worker that does not answer alone for missing tokens. See `write_proposals`."""
        self._send(Kind.PROPOSALS, wire.write_proposals(tokens, sources, width))

    def _send(self, kind: Kind, payload: list[int], features: torch.Tensor | None = None) -> None:
        self.is_reusable = False  # until the message is sent: an interrupt may leave half of it
        announced = None
        if features is not None and len(features):  # the outcome leaves first, and the features are copied after it
            features = features.float() if features.dtype == torch.float64 else features
            announced = Message(Kind.FEATURES, self.number, self.round, features.flatten())
        self.worker.channel.send(Message(kind, self.number, self.round, payload, announces=announced))
        if announced is not None:
            self.worker.channel.send_announced(announced.payload)
        self.worker.channel.expect()
        self.is_reusable = True

    def receive_speculation(self, timeout: float | None = None) -> Speculation:
        speculation = self._receive(Kind.SPECULATION, self._read_speculation, timeout)
        self.speculation = speculation
        self.is_reusable = False
        self.worker.channel.expect()  # the next message may arrive while the target computes
        self.is_reusable = True
        return speculation

    def _read_speculation(self, payload) -> Speculation:
        speculation = wire.read_speculation(payload, self.rows, self.vocab_size)
        if self.is_alone and len({*map(len, speculation.tokens)} - {0}) > 1:
            raise ProtocolError("the rows of a speculation that is to be verified have different lengths")
        return speculation

    def receive_probabilities(self) -> torch.FloatTensor:
        shape = self.rows, self.speculation.width, self.vocab_size
        return self._receive(Kind.PROBABILITIES, lambda payload: payloads.read_probabilities(payload, shape))

    def _receive(self, kind: Kind, read: Callable, timeout: float | None = None):
        """
        Returns the result of `read` for the payload of the next message, which must be of this kind and of the current
        round; older messages are dropped. Raises [`DraftError`] if there is no such message in time.
        """
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        self.is_reusable = False  # until the worker has answered
        try:
            while True:
                message = self.worker.channel.receive(max(0.0, deadline - time.monotonic()))
                if message.kind == Kind.ERROR and not message.session:
                    break  # the worker could not read a message, so it does not know the call
                if message.session == self.number and (message.round >= self.round or message.kind == Kind.ERROR):
                    break
            if message.kind == Kind.ERROR:
                traceback = payloads.read_text(message.payload)
                self.is_reusable = "CUDA error" not in traceback  # after a CUDA error, the device fails in that process
                raise DraftError(f"The draft worker raised:\n{traceback}")
            wire.expect(message, kind, self.number, self.round)
            result = read(message.payload)
        except ProtocolError as error:
            raise DraftError(f"The draft worker sent something unexpected: {error}") from error
        except TimeoutError:
            raise DraftError(f"The draft worker did not answer within {self.timeout:g} s.") from None
        except PeerLost as error:
            raise DraftError(f"The draft worker has ended. {self.worker.stderr_tail()}".strip()) from error
        self.is_reusable = True
        return result

    def close(self) -> None:
        """Leaves the worker at rest, or kills it if it cannot be used again; the next call then starts another."""
        if self.is_reusable and self.worker.is_alive:
            self.worker.channel.send(Message(Kind.END, self.number))
        else:
            self.worker.kill()
        self.on_close()
