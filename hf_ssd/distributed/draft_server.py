"""What the draft does for one generate() call after another: receive, answer, prepare, and so on."""

import contextlib
import time
import traceback

import torch
from transformers import PreTrainedModel

from .. import devices
from ..cache.speculation import Speculation
from ..devices import from_host
from ..speculation.experience import Experience
from ..speculation.fallback import Backup, Proposal
from ..speculation.planner import PREPARED, Plan
from ..speculation.speculator import Speculator
from ..speculation.trunk import Trunk
from . import messages, payloads
from .channel import AWAKE, Channel, PeerLost
from .device_link import LINK_TIMEOUT
from .messages import Kind, Message
from .payloads import Found
from .session import Answer, SessionRequest

PROMPTS_TIMEOUT = 10.0  # seconds for the prompts to follow the request
# Seconds before the end of a rest from which on a worker does not sleep: a processor that slept for seconds takes up to
# twice as long for everything in the next half second, and what is tried then would look slower than it is.
WARM_UP = 0.3


class CallEnded(Exception):
    """The target has broken off the call in which it was asked for something."""

    def __init__(self, message: Message):
        self.message = message


class DraftServer:
    """
    Serves one generate() call after another over a channel.

    Args:
        channel (`Channel`): To the target.
        model (`PreTrainedModel`): The draft model.
    """

    def __init__(self, channel: Channel, model: PreTrainedModel):
        self.channel, self.model = channel, model
        self.speculator: Speculator | None = None
        self.trunk: Trunk | None = None  # of the last call, which the next one may continue
        self.ready: Speculation | None = None  # what was prepared for the outcome, if others are asked as well
        self.session = self.round = self.rest = 0
        self.seconds = self.answer_seconds = self.prepared_at = self.answered_at = 0.0
        self.experience = Experience()
        self.handlers = {
            Kind.OUTCOME: self._answer, Kind.NEWS: self._learn, Kind.COMPLETE: self._complete, Kind.FOLLOW: self._follow
        }  # fmt: skip

    @torch.inference_mode()
    def serve(self) -> None:
        """Returns when the target says so, or raises [`PeerLost`] when its process has ended."""
        while True:
            message = Message(Kind.ERROR)  # of no call, as long as nothing could be read
            try:
                message = self._next_message()
                if message.kind == Kind.STOP and not message.session:
                    return
                self._handle(message)
            except PeerLost:
                raise
            except CallEnded as ended:
                self.speculator = self.trunk = None
                self._end(ended.message)
            except Exception:
                self.speculator = self.trunk = None
                text = payloads.text_to_payload(traceback.format_exc())
                self.channel.send(Message(Kind.ERROR, message.session, message.round, text))

    def _next_message(self) -> Message:
        """Waits for the next message, asleep while it is not asked soon."""
        if self.speculator is None:
            return self.channel.receive(timeout=None, awake=0.0)
        if not self.rest:
            return self.channel.receive(timeout=None)
        asleep = self.speculator.rest_seconds - WARM_UP
        if asleep > 0:
            with contextlib.suppress(TimeoutError):
                return self.channel.receive(asleep, awake=0.0)
        return self.channel.receive(timeout=None, awake=WARM_UP + AWAKE)

    def _handle(self, message: Message) -> None:
        if message.kind == Kind.START:
            self._start(message)
        elif message.kind == Kind.END:
            self._end(message)
        elif message.kind == Kind.LINK:
            messages.expect(message, Kind.LINK, 0, 0, length=0)
            self._link()
        elif message.session == self.session and self.speculator is not None and message.kind in self.handlers:
            self.handlers[message.kind](message)
        # What is left belongs to a call that failed or was broken off, and is dropped.

    def _link(self) -> None:
        works = self.channel.open_link(self.model.device)
        self.channel.send(Message(Kind.LINK, payload=payloads.json_to_payload(works)))
        verdict = self.channel.receive(2 * LINK_TIMEOUT)
        messages.expect(verdict, Kind.LINK, 0, 0)
        if not payloads.payload_to_json(verdict.payload):
            self.channel.close_link()

    def _start(self, message: Message) -> None:
        prompts = self.channel.receive(timeout=PROMPTS_TIMEOUT)
        while prompts.kind == Kind.START:  # a call that was broken off before its prompts left, or never was one
            message, prompts = prompts, self.channel.receive(timeout=PROMPTS_TIMEOUT)
        messages.expect(prompts, Kind.PROMPTS, message.session, message.round)
        rows = payloads.payload_to_prompts(prompts.payload)
        self.channel.make_room(len(rows), self.model.config.get_text_config(decoder=True).vocab_size)
        request = SessionRequest.from_dict(payloads.payload_to_json(message.payload), rows)
        start = time.perf_counter()
        self.session, self.round, self.rest = message.session, 0, 0
        speculator = Speculator(
            self.model,
            request.config,
            request.generation_config,
            request.prompts,
            request.seed,
            self.experience,
            _TargetBackup(self) if request.asks_target else None,
            request.share,
            self.trunk,
            request.prompt_length,
        )
        self.trunk = speculator.trunk
        speculator.prefill()
        self.channel.expect()
        speculator.prepare(self.channel.has_arrived)
        self.speculator, self.seconds, self.prepared_at = speculator, time.perf_counter() - start, start

    def _end(self, message: Message) -> None:
        speculator, self.speculator, self.ready = self.speculator, None, None
        if self.channel.link is not None:
            self.channel.send(Message(Kind.END, message.session))
        if speculator is not None and message.session == self.session:
            if len(message.payload):
                for outcome in payloads.payload_to_outcomes(message.payload, len(speculator.trunk.lengths)):
                    speculator.catch_up(*outcome[:3])
            speculator.end()

    def _outcomes(self, message: Message, kind: Kind) -> list[tuple]:
        """Returns the outcomes that a message tells of, and moves on to the round of the last one."""
        outcomes = payloads.payload_to_outcomes(message.payload, len(self.speculator.trunk.lengths))
        self.round += len(outcomes) - 1
        messages.expect(message, kind, self.session, self.round)
        return outcomes

    def _learn(self, message: Message) -> None:
        """Takes in what went by while no one waits, so that who asks at the end of a rest need not wait for it."""
        for outcome in self._outcomes(message, Kind.NEWS):
            self.speculator.catch_up(*outcome[:3])
        self.round += 1
        if self.speculator.rest <= messages.ROUNDS_BETWEEN_NEWS:
            self.speculator.feed()

    def _answer(self, message: Message) -> None:
        speculator, budget = self.speculator, self.speculator.prepared_budget
        outcomes = self._outcomes(message, Kind.OUTCOME)
        for outcome in outcomes[:-1]:
            speculator.catch_up(*outcome[:3])
        self.answered_at = start = time.perf_counter()
        ready = speculator.look_up(*outcomes[-1])
        if speculator.share[1] > 1:
            self.ready, self.answer_seconds = ready, time.perf_counter() - start
            found = Found(self._figures(ready, budget), speculator.plan)
            self.send(Kind.FOUND, payloads.found_to_payload(found))
            self.channel.expect()
            return
        speculation = speculator.complete(ready)
        self.answer_seconds = time.perf_counter() - start
        q = speculation.probabilities
        if q is None or not q.shape[1]:
            self.send(Kind.SPECULATION, payloads.answer_to_payload(self._figures(speculation, budget)))
        else:
            self._send_with_probabilities(speculation, budget)
        self._prepare()

    def _send_with_probabilities(self, speculation: Speculation, budget: int) -> None:
        """
        Tokens first: with them the target can start, and needs what they were drawn from only when it is done. That is
        announced, so that it can arrive meanwhile, and packed only now, which may copy megabytes from a GPU.
        """
        q, over_link = speculation.probabilities, self.channel.link is not None
        figures = self._figures(speculation, budget)
        support = [] if over_link else [payloads.largest_support(q)]
        figures.tokens, *support = devices.to_host(figures.tokens, *support)
        support = int(support[0]) if support else q.shape[-1]
        to_come = payloads.probabilities_to_come(tuple(q.shape), support)
        announced = Message(Kind.PROBABILITIES, self.session, self.round, to_come, over_link)
        self.send(Kind.SPECULATION, payloads.answer_to_payload(figures), announces=announced)
        self.channel.send_announced(payloads.probabilities_to_payload(q, support))

    def _complete(self, message: Message) -> None:
        """Drafts what no one has prepared."""
        messages.expect(message, Kind.COMPLETE, self.session, self.round)
        start = time.perf_counter()
        speculator, own = self.speculator, self.ready
        tokens, hits, known = payloads.payload_to_complete(message.payload, len(speculator.trunk.lengths))
        merged = Speculation(from_host(tokens, self.model.device), None, hits)
        if speculator.proposals.noise is not None:  # the target has those of the other drafts' rows from them
            shape = (*tokens.shape, speculator.vocab_size)
            merged.probabilities = torch.zeros(shape, dtype=torch.float32, device=self.model.device)
            if own.probabilities is not None:
                merged.probabilities[:, : own.tokens.shape[1]] = own.probabilities
        speculation = speculator.complete(merged, known)
        self.answer_seconds += time.perf_counter() - start
        source = next((source for source in speculator.sources if source != PREPARED), "primary")
        answer = self._figures(speculation, 0)
        self.send(Kind.COMPLETED, payloads.completed_to_payload(answer, source))
        self._send_probabilities(speculation.probabilities)
        self._prepare()

    def _follow(self, message: Message) -> None:
        """Takes over what is verified now."""
        messages.expect(message, Kind.FOLLOW, self.session, self.round)
        rows = len(self.speculator.trunk.lengths)
        tokens, hits, mine, source, plan = payloads.payload_to_follow(message.payload, rows)
        if self.ready.probabilities is not None and len(mine):
            mine = from_host(mine, self.model.device)
            self._send_probabilities(self.ready.probabilities[mine, : tokens.shape[1]])
        self.speculator.follow(tokens, hits.tolist(), source)
        self._prepare(plan)

    def _prepare(self, plan: Plan | None = None) -> None:
        self.round, self.ready = self.round + 1, None
        self.prepared_at = start = time.perf_counter()
        self.channel.expect()
        self.speculator.prepare(self.channel.has_arrived, None if self.speculator.planner.is_repeatable else plan)
        self.seconds = time.perf_counter() - start

    def _figures(self, speculation: Speculation, budget: int) -> Answer:
        seconds = self.seconds + self.answer_seconds
        times = seconds, self.answer_seconds, budget, self.prepared_at, self.answered_at
        self.rest = self.speculator.rest
        return Answer(speculation.tokens, speculation.hits, *times, self.rest)

    def _send_probabilities(self, probabilities: torch.FloatTensor | None) -> None:
        if probabilities is None or not probabilities.shape[1]:
            return
        over_link = self.channel.link is not None
        payload = payloads.probabilities_to_payload(probabilities, probabilities.shape[-1] if over_link else None)
        self.send(Kind.PROBABILITIES, payload, over_link=over_link)

    def send(self, kind: Kind, payload: torch.Tensor, **options) -> None:
        """Sends a message of the current round. See [`~hf_ssd.distributed.messages.Message`] for options."""
        self.channel.send(Message(kind, self.session, self.round, payload, **options))

    def receive(self, kind: Kind) -> torch.Tensor:
        """Returns the payload of the next message of the current round, which the target sends without being late."""
        message = self.channel.receive(self.speculator.config.timeout)
        if (message.kind, message.session) == (Kind.END, self.session):
            raise CallEnded(message)
        messages.expect(message, kind, self.session, self.round)
        return message.payload


class _TargetBackup(Backup):
    """The user's own fallback, which is an object in the target's process, as the draft sees it."""

    def __init__(self, server: DraftServer):
        self.server = server

    def propose(self, ids: torch.LongTensor, lengths: list[int], rows: list[int], lookahead: int) -> Proposal:
        self.server.send(Kind.BACKUP_REQUEST, payloads.backup_request_to_payload(rows, lookahead))
        proposal, probabilities_follow = payloads.payload_to_proposal(self.server.receive(Kind.BACKUP), len(rows))
        if probabilities_follow:
            shape = (*proposal.tokens.shape, self.server.speculator.vocab_size)
            payload = self.server.receive(Kind.PROBABILITIES)
            proposal.probabilities = payloads.payload_to_probabilities(payload, shape)
        return proposal
