"""The loop in which the draft serves generate() calls: receive, answer, prepare, and so on."""

import math
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..cache.kept_prefixes import KeptPrefixes
from ..drafting.draft_info import DraftInfo
from ..drafting.drafts import Drafts
from ..drafting.request import SessionRequest
from ..drafting.speculator import Speculator
from ..drafting.verified_prefix import VerifiedPrefix
from ..drafting.vocabulary import Translation
from ..rounds import IN_TURN, Plan, Speculation
from . import wire
from .cores import DraftCores
from .requests import read_options, read_request
from .transport import AWAKE, Channel, PeerLost
from .weights import copy_shared_weights
from .wire import Kind, Message

FEATURES_TIMEOUT = 10.0  # seconds for the target's hidden states to follow the outcome


@dataclass
class Call:
    """A generate() call that the draft serves, and the preparation of its next speculation."""

    number: int
    speculator: Speculator
    request: SessionRequest
    mode: str | None = None
    round: int = -1
    passes: Iterator[None] | None = None  # of the preparation, if it goes on


class DraftServer:
    """Handles a message that has come, and otherwise takes a pass of a call's preparation, of the calls in turn."""

    def __init__(self, channel: Channel, model: PreTrainedModel, weights: dict | None = None, cores=None):
        self.channel, self.model, self.drafts = channel, model, Drafts()
        self.cores: DraftCores = cores or DraftCores()
        self.calls: dict[int, Call] = {}  # by their sessions; whose preparation has waited longest is first
        self.prefix: VerifiedPrefix | None = None  # of the call that ended last, which the next call may continue
        self.kept = KeptPrefixes()  # of rows of running batches
        self.weights = weights  # the description of those that the model shares, if it does
        self.weights_version = 0 if weights is None else weights["version"]
        self.translation: Translation | None = None  # which came last, for calls whose tokenizers differ

    @torch.inference_mode()
    def serve(self) -> None:
        """Serves calls until the target's process has ended, which raises [`PeerLost`]."""
        while True:
            number = round_ = 0  # errors belong to no call until a message was read
            try:
                growing = self.growing
                if growing is not None and not self.channel.has_arrived():
                    number, round_ = growing.number, growing.round
                    self.grow(growing)
                else:
                    # A wait keeps no core busy if it is long, or if a target computes on that core, as in its prefill.
                    is_long = not self.calls or any(call.mode is None for call in self.calls.values())
                    self.channel.awake = 0.0 if is_long or self.cores.are_taken_in_turn else AWAKE
                    message = self.channel.receive(math.inf)
                    number, round_ = message.session, message.round
                    self.handle(message)
                    self.channel.expect()
            except PeerLost:
                raise
            except Exception:
                for one in [number] if number else list(self.calls):  # all calls if it is not known which has failed
                    self.calls.pop(one, None)
                self._share_cores()
                self.channel.send(Message(Kind.ERROR, number, round_, traceback.format_exc()))

    @property
    def growing(self) -> Call | None:
        return next((call for call in self.calls.values() if call.passes is not None), None)

    def grow(self, call: Call) -> None:
        """Takes the next pass of the preparation, if any is left."""
        self.calls[call.number] = self.calls.pop(call.number)  # the others come first now
        if next(call.passes, call) is call:
            call.passes = None

    def handle(self, message: Message) -> None:
        call = self.calls.get(message.session)
        is_of_call = call is not None  # which has neither failed nor been interrupted
        if is_of_call and message.kind != Kind.END:
            wire.expect(message, message.kind, call.number, call.round)
        match message.kind:
            case Kind.START:
                self._start(message)
            case Kind.JOIN if is_of_call:
                self._join(call, message)
            case Kind.OUTCOME if is_of_call:
                self._answer(call, message)
            case Kind.SPECULATION if is_of_call:
                self._take_proposals(call, message)
            case Kind.END if is_of_call:
                self._end(call)

    def _start(self, message: Message) -> None:
        own = self.model.config.get_text_config(decoder=True).vocab_size
        request = read_request(message.payload, self.translation, own)
        self.translation = request.translation or self.translation
        self._make_room(len(request.prompts), request.vocab_size, request.generation_config)
        if request.weights_version != self.weights_version:
            self._take_new_weights(request.weights_version)
        request.kept = self.kept
        if not (request.keep_prefixes or self.calls):
            self.kept.close()  # no running batch uses it
        earlier, self.prefix = self.prefix, None
        speculator = self.drafts.speculator(self.model, request, earlier)
        call = self.calls[message.session] = Call(message.session, speculator, request)
        self._share_cores()  # the target reads the prompts too
        speculator.drafter.begin()
        self._prepare(call, request.plan)

    def _make_room(self, rows: int, vocab_size: int, options: GenerationConfig) -> None:
        """Allows the largest messages of rows with these options: distributions, and features of all tokens."""
        features = rows * (options.max_length or 0) * DraftInfo.of(self.model.config).target_width
        self.channel.make_room(rows, vocab_size, features)

    def _take_new_weights(self, version: int) -> None:
        """Drops the keys and values of the previous weights, and copies the new weights to an accelerator."""
        self.prefix, self.weights_version = None, version
        self.kept.close()
        if self.weights is not None and self.model.device.type != "cpu":  # a CPU model uses the shared memory itself
            copy_shared_weights(self.model, self.weights)

    def _end(self, call: Call) -> None:
        del self.calls[call.number]
        self._share_cores()
        call.speculator.end()
        if self.prefix is not None:
            self.prefix.decoder.close()
        self.prefix = call.speculator.drafter.prefix

    def _share_cores(self) -> None:
        self.cores.serve([(call.request.has_half, call.mode != IN_TURN) for call in self.calls.values()])

    def _join(self, call: Call, message: Message) -> None:
        rows, vocab_size = len(call.speculator.finished), call.speculator.drafter.vocab_size
        row, start, tokens, settings, seed = wire.read_join(message.payload, rows, vocab_size)
        options = None if settings is None else read_options(settings)
        if options is not None:
            self._make_room(rows, vocab_size, options)
        call.speculator.join(row, start, tokens, options, seed)

    def _answer(self, call: Call, message: Message) -> None:
        speculator = call.speculator
        outcome, plan = wire.read_outcome(message.payload, len(speculator.finished))
        if plan.mode != call.mode:
            call.mode = plan.mode
            self._share_cores()
        is_alone = speculator.num_workers == 1
        outcome.states = lambda tokens, width: self._receive_states(call, tokens, width)
        if call.passes is not None:
            speculator.stop(call.passes)
            call.passes = None
        found = speculator.look_up(outcome, plan)
        self._send(call, speculator.complete(found) if is_alone else found)
        if speculator.drafter.reads_target:  # they come before any other message
            speculator.catch_up()
        if is_alone and not speculator.waits:
            self._prepare(call, plan)

    def _receive_states(self, call: Call, tokens: int, width: int) -> torch.Tensor:
        message = self.channel.receive(FEATURES_TIMEOUT)
        wire.expect(message, Kind.FEATURES, call.number, call.round)
        return wire.read_features(message.payload, tokens, width)

    def _take_proposals(self, call: Call, message: Message) -> None:
        """Moves on to the tokens that are verified next, after drafting those that no worker has prepared if asked."""
        speculator, drafter = call.speculator, call.speculator.drafter
        told = wire.read_speculation(message.payload, len(speculator.finished), drafter.vocab_size)
        if not told.record.lookahead:
            speculator.take_speculation(told.tokens, told.record.sources)
        else:
            if drafter.uses_q:  # the target has the distributions of these tokens
                shape = len(told.tokens), told.width, drafter.vocab_size
                told.probabilities = torch.zeros(shape, dtype=torch.float32, device=self.model.device)
            self._send(call, speculator.complete(told, told.record.lookahead))
            if speculator.waits:
                return
        self._prepare(call, speculator.plan)

    def _prepare(self, call: Call, plan: Plan) -> None:
        """Chooses outcomes, and begins to grow their branches."""
        self.channel.expect()  # the next message may arrive meanwhile
        call.round += 1
        call.passes = call.speculator.passes(plan)
        self.grow(call)

    def _send(self, call: Call, speculation: Speculation) -> None:
        """Sends the tokens, with which the target starts, and then their distributions, which it needs later."""
        drafter, announced = call.speculator.drafter, None
        if drafter.uses_q and speculation.width:
            to_come = torch.empty(len(speculation.tokens), speculation.width, drafter.vocab_size, device="meta")
            to_come = wire.write_probabilities(to_come, speculation.support)
            announced = Message(Kind.PROBABILITIES, payload=to_come)
        payload = wire.write_speculation(speculation)
        self.channel.send(Message(Kind.SPECULATION, call.number, call.round, payload, announces=announced))
        if announced is not None:  # not packed before, because packing may copy megabytes from a GPU
            q = call.speculator.distributions(speculation)[:, : speculation.width]
            self.channel.send_announced(wire.write_probabilities(q, speculation.support))
