"""The draft as the target sees it, for the length of one generate() call."""

import time
from collections.abc import Callable

import torch
from transformers import GenerationConfig

from ..drafting.request import SessionRequest
from ..rounds import IN_TURN, Outcome, Plan, RoundRecord, Speculation
from . import wire
from .requests import settings_of
from .transport import AWAKE, PeerLost
from .wire import Kind, Message, ProtocolError


class DraftError(RuntimeError):
    """The draft worker died, hung, raised, or sent something that makes no sense."""


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
        # The row then takes part in the next verification, without tokens from the draft.
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
        """Returns the distributions `(rows, width, vocab_size)` that the tokens of the speculation were drawn from."""
        # Not called for a speculation without tokens. A session of another kind returns `None` if they are lost.
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
