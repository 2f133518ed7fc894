"""The draft as the target sees it, for the length of one generate() call."""

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..cache.kept_prefixes import AUTO, KeptPrefixes
from ..config import SSDConfig
from ..drafting.drafts import Drafts
from ..drafting.vocabulary import Translation
from ..rounds import AHEAD, IN_TURN, RANDOM, Outcome, Plan, RoundRecord, Speculation
from . import wire
from .transport import AWAKE, PeerLost
from .wire import PLAN, Field, Kind, Message, ProtocolError

# Settings that do not affect proposals; some of them are objects.
NOT_FOR_THE_DRAFT = ("compile_config", "cache_config", "watermarking_config", "continuous_batching_config")
KEPT = "kept"  # a translation that the worker has from an earlier call
MOST_WORKERS, MOST_TOKENS = 1024, 2**22
RAISED = "The draft raised"


class DraftError(RuntimeError):
    """The draft worker died, hung, raised, or sent something that makes no sense."""


@contextlib.contextmanager
def raised_as(kind: type[Exception], what: str):
    """Raises any exception as one of this kind: a model, and transformers that reads a damaged value, may raise any."""
    try:
        yield
    except Exception as error:
        raise kind(f"{what} {type(error).__name__}: {error}") from error


def integer(*limits: int, read=int, **options):
    """Returns a field of [`SessionRequest`] that travels as an integer within these limits."""
    return field(metadata={"wire": Field(*limits, read=read)}, **options)


@dataclass
class SessionRequest:
    """The part of a generate() call that the draft needs to know. The last three fields are not sent."""

    config: SSDConfig
    generation_config: GenerationConfig  # the one that transformers prepared, `max_length` included
    prompts: list[torch.LongTensor]  # without padding
    seed: int = integer(0, 2**31 - 1)
    vocab_size: int = integer(1, MOST_TOKENS)
    translation: Translation | None = None  # from the target's tokens to the draft's, if their tokenizers differ
    plan: Plan = Plan(AHEAD, 1, 1, 1)  # until the first outcome arrives
    worker_index: int = integer(0, MOST_WORKERS - 1, default=0)
    num_workers: int = integer(1, MOST_WORKERS, default=1)
    prompt_length: int | None = integer(default=None)  # of the longest prompt, without tokens from before the draft
    weights_version: int = integer(default=0)  # the worker drops keys and values that it computed with another one
    has_half: bool = integer(0, 1, read=bool, default=False)  # whether the draft has half of the CPU cores
    keep_prefixes: int = integer(AUTO, default=0)  # bytes of texts that the draft keeps in running batches
    head: object = None  # a fallback that reads hidden states of the target
    kept: KeptPrefixes | None = None  # these texts, of a draft in this process
    forced: Callable[[int, list[int]], list[int]] | None = None  # the tokens that must follow a row's new tokens

    def __post_init__(self):
        if self.prompt_length is None:
            self.prompt_length = max(map(len, self.prompts))

    def to_dict(self) -> dict:
        """Returns everything as [`~wire.pack`] can send it, except a translation, which is `KEPT`."""
        config = self.config
        if not isinstance(config.fallback, str):  # all proposers in the target's process are one to the draft
            config = dataclasses.replace(config, fallback=RANDOM)
        return {
            "ssd_config": config.to_dict(),
            "generation_config": settings_of(self.generation_config),
            "prompts": [prompt.tolist() for prompt in self.prompts],
            "translation": None if self.translation is None else KEPT,
            "plan": wire.write_fields(PLAN, self.plan),
            "numbers": wire.write_fields(REQUEST, self),
        }

    @classmethod
    def from_dict(cls, values: dict, translation: Translation | None, draft_size: int) -> "SessionRequest":
        """Reads a call, or raises [`ProtocolError`]. It may mean the `translation` again that came last."""
        with raised_as(ProtocolError, "a call cannot be read:"):
            generation_config = read_options(values["generation_config"])
            config = SSDConfig.from_dict(values["ssd_config"])
            plan, numbers, new, prompts = (values[name] for name in ("plan", "numbers", "translation", "prompts"))
            if new not in (None, KEPT):
                translation = Translation.from_tensor(torch.tensor(new, dtype=torch.long), draft_size)
        plan, numbers = wire.read_plan(plan), wire.read_fields(REQUEST, numbers, "a call")
        vocab_size = numbers["vocab_size"]
        if numbers["worker_index"] >= numbers["num_workers"]:
            raise ProtocolError(f"a call cannot have {numbers}")
        if new is None:
            translation = None
        elif translation is None or len(translation.pieces) != vocab_size:
            raise ProtocolError(f"a call translates {vocab_size} tokens, and no such translation has come")
        if type(prompts) is not list or not prompts or any(prompts) != all(prompts):  # rows that join later have none
            raise ProtocolError(f"a call cannot have the prompts {prompts!r:.100}")
        rows = wire.read_tokens(prompts, len(prompts), MOST_TOKENS, vocab_size)
        prompts = [torch.tensor(row, dtype=torch.long) for row in rows]
        return cls(config, generation_config, prompts, translation=translation, plan=plan, **numbers)


REQUEST = {one.name: one.metadata["wire"] for one in dataclasses.fields(SessionRequest) if one.metadata}


def settings_of(generation_config: GenerationConfig) -> dict:
    """Returns the settings that affect proposals as JSON can hold them."""
    # Values under names with an underscore are tensors that transformers derives anew on each side.
    known = vars(GenerationConfig()).keys() - {*NOT_FOR_THE_DRAFT}  # attributes of the user's own can be anything
    settings = {k: v for k, v in vars(generation_config).items() if k in known and not k.startswith("_")}
    if isinstance(settings.get("sequence_bias"), dict):  # transformers also accepts pairs, which JSON can hold
        settings["sequence_bias"] = [[list(tokens), bias] for tokens, bias in settings["sequence_bias"].items()]
    return settings


def read_options(settings: dict) -> GenerationConfig:
    with raised_as(ProtocolError, "settings cannot be read:"):
        return GenerationConfig.from_dict(settings)


class DraftSession:
    """
    A link to the draft, for the length of a generate() call. A round is `send_outcome`, `receive_speculation`, and when
    sampling `receive_probabilities`, in this order. Each may raise [`DraftError`], and is not called again after it.
    `close` follows, whatever happened before, and may be called more than once.
    """

    def begin(self) -> None:
        """A draft in this process begins when it is made."""


class WorkerSession(DraftSession):
    """A call with a single worker, which may serve other calls at the same time. It drops messages that come late."""

    def __init__(self, worker, number: int, request: SessionRequest):
        self.channel, self.takes_cores = worker.channel, worker.worker_info.get("takes_cores")
        self.number, self.request, self.timeout = number, request, request.config.timeout
        self.rows, self.vocab_size, self.round = len(request.prompts), request.vocab_size, -1
        self.is_reusable, self.awake = True, AWAKE

    def begin(self) -> None:
        self.channel.start(self.number, self.request)

    def join(self, row: int, start: int, tokens: list[int], options: GenerationConfig | None, seed: int) -> None:
        """Gives the tokens of a row after its first `start`. With the last ones come its `options`."""
        settings = None if options is None else settings_of(options)
        self.channel.send(Message(Kind.JOIN, self.number, self.round + 1, [row, start, tokens, settings, seed]))

    def send_outcome(self, outcome: Outcome, plan: Plan) -> None:
        """Says which tokens were decided since the last answer, at first that of the prefill, and how to go on."""
        self.round += 1
        self.awake = 0.0 if plan.mode == IN_TURN and self.takes_cores else AWAKE
        states, announced = outcome.states, None
        if states is not None and len(states):  # the outcome leaves first, and the states are copied after it
            states = states.float() if states.dtype == torch.float64 else states
            announced = Message(Kind.FEATURES, payload=states.flatten())
        payload = wire.write_outcome(outcome, plan)
        self.channel.send(Message(Kind.OUTCOME, self.number, self.round, payload, announces=announced))

    def send_proposals(self, tokens: list[list[int]], sources: list[str], width: int = 0) -> None:
        """Says what is verified. With a `width`, asks for the tokens that rows lack, and a speculation answers."""
        told = Speculation(tokens, None, RoundRecord(lookahead=width, sources=sources))
        self.channel.send(Message(Kind.SPECULATION, self.number, self.round, wire.write_speculation(told)))

    def receive_speculation(self, timeout: float | None = None) -> Speculation:
        # A row that has missed, and for which the plan names a proposer of the target's process, has no tokens and the
        # source `NOTHING`. `send_proposals` must follow.
        self.speculation = self._receive(Kind.SPECULATION, timeout, wire.read_speculation, self.rows, self.vocab_size)
        return self.speculation

    def receive_probabilities(self) -> torch.FloatTensor:
        """Returns the distributions of the tokens. A draft of another kind returns `None` if they are lost."""
        shape = self.rows, self.speculation.width, self.vocab_size
        return self._receive(Kind.PROBABILITIES, None, wire.read_probabilities, shape)

    def _receive(self, kind: Kind, timeout: float | None, read: Callable, *size):
        """Returns the result of `read` for the next payload, which must be of this kind and of the current round."""
        calls = len(self.channel.inboxes)  # the worker may be busy with each of them
        deadline = time.monotonic() + calls * (self.timeout if timeout is None else timeout)
        self.is_reusable = False  # until the worker has answered
        try:
            message = None
            while message is None or message.round < self.round:
                message = self.channel.receive(self.number, deadline - time.monotonic(), self.awake)
                if message.kind == Kind.ERROR:
                    traceback = str(message.payload)
                    self.is_reusable = "CUDA error" not in traceback  # it makes the device useless to that process
                    raise DraftError(f"The draft worker raised:\n{traceback}")
            wire.expect(message, kind, self.number, self.round)
            result = read(message.payload, *size)
        except ProtocolError as error:
            raise DraftError(f"The draft worker sent something unexpected: {error}") from error
        except TimeoutError:
            raise DraftError(f"The draft worker did not answer within {calls * self.timeout:g} s.") from None
        except PeerLost as error:
            tail = self.channel.process.stderr_tail()
            raise DraftError(f"The draft worker has ended. {tail}".strip()) from error
        except KeyboardInterrupt:
            self.is_reusable = self.channel.is_shared  # the other calls notice it if the worker hangs
            raise
        self.is_reusable = True
        return result

    def close(self) -> None:
        """Leaves the worker at rest, or ends it if it cannot be used again; the next call then starts another."""
        self.channel.leave(self.number, self.is_reusable)


_drafts: "weakref.WeakKeyDictionary[PreTrainedModel, Drafts]" = weakref.WeakKeyDictionary()


class LocalSession(DraftSession):
    """The draft works, and prepares if a plan has a budget, while the target waits for its answer."""

    def __init__(self, model: PreTrainedModel, request: SessionRequest):
        with raised_as(DraftError, RAISED):
            self.speculator = _drafts.setdefault(model, Drafts()).speculator(model, request)
            self.speculator.plan, self.join = request.plan, self.speculator.join
            self.speculator.drafter.begin()

    def send_outcome(self, outcome: Outcome, plan: Plan) -> None:
        self.told = outcome, plan

    def receive_speculation(self) -> Speculation:
        with raised_as(DraftError, RAISED):
            self.speculator.prepare(self.speculator.plan)
            self.answer = self.speculator.complete(self.speculator.look_up(*self.told))
            return self.answer

    def send_proposals(self, tokens: list[list[int]], sources: list[str]) -> None:
        self.speculator.take_speculation(tokens, sources)

    def receive_probabilities(self) -> torch.FloatTensor | None:
        with raised_as(DraftError, RAISED):
            return self.speculator.distributions(self.answer)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the call has all its tokens
            self.speculator.end()
