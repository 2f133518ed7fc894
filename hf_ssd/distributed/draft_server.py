"""The loop in which the draft serves generate() calls: receive, answer, prepare, and so on."""

import traceback

import torch
from transformers import PreTrainedModel

from ..cache.kept_prefixes import KeptPrefixes
from ..drafting.draft_info import DraftInfo
from ..drafting.drafts import Drafts
from ..drafting.speculator import Speculator
from ..drafting.verified_prefix import VerifiedPrefix
from ..drafting.vocabulary import Translation
from ..rounds import IN_TURN, Plan, Speculation, padded
from . import wire
from .cores import DraftCores
from .sessions import SessionRequest, read_options
from .transport import AWAKE, Channel, PeerLost
from .weights import copy_shared_weights
from .wire import Kind, Message

FEATURES_TIMEOUT = 10.0  # seconds for the target's hidden states to follow the outcome


class DraftServer:
    """Serves generate() calls in turn over a channel. `weights` describes those that the model shares, if it does."""

    def __init__(
        self, channel: Channel, model: PreTrainedModel, weights: dict | None = None, cores: DraftCores | None = None
    ):
        self.channel, self.model, self.drafts = channel, model, Drafts()
        self.cores = cores or DraftCores()
        self.prefix: VerifiedPrefix | None = None  # of the last call, which the next call may continue
        self.kept = KeptPrefixes()  # of rows of running batches
        self.weights, self.weights_version = weights, 0 if weights is None else weights["version"]
        self.speculator: Speculator | None = None  # of the call, if there is one
        self.translation: Translation | None = None  # for calls whose tokenizers differ
        self.session = self.round = 0

    @torch.inference_mode()
    def serve(self) -> None:
        """Serves calls until the target's process has ended, which raises [`PeerLost`]."""
        while True:
            message = Message(Kind.ERROR)  # errors belong to no call until a message was read
            try:
                self.channel.awake = 0.0 if self.speculator is None or self.cores.are_taken_in_turn else AWAKE
                message = self.channel.receive(None)
                self.handle(message)
            except PeerLost:
                raise
            except Exception:
                self.speculator = self.prefix = None
                self.channel.send(Message(Kind.ERROR, message.session, message.round, traceback.format_exc()))

    def handle(self, message: Message) -> None:
        """Drops messages of a call that failed or was interrupted."""
        is_of_call = message.session == self.session and self.speculator is not None
        match message.kind:
            case Kind.START:
                self._start(message)
            case Kind.JOIN if is_of_call:
                self._join(message)
            case Kind.OUTCOME if is_of_call:
                self._answer(message)
            case Kind.SPECULATION if is_of_call:
                self._take_proposals(message)
            case Kind.END if is_of_call:
                self._end()

    # ---------------------------------------------------------------- between calls

    def _start(self, message: Message) -> None:
        self.speculator = None
        own = self.model.config.get_text_config(decoder=True).vocab_size
        request = SessionRequest.from_dict(message.payload, self.translation, own)
        self.cores.begin_call(request.has_half)  # the target reads the prompts too
        self.translation, rows = request.translation or self.translation, len(request.prompts)
        longest = request.generation_config.max_length or 0
        features = rows * longest * DraftInfo.of(self.model.config).target_width
        self.channel.make_room(rows, request.vocab_size, features)
        self.session, self.round = message.session, -1
        if request.weights_version != self.weights_version:
            self._take_new_weights(request.weights_version)
        request.kept = self.kept
        self.speculator = self.drafts.speculator(self.model, request, self.prefix)
        self.prefix = self.speculator.drafter.prefix
        self.speculator.begin()
        self._prepare(request.plan)

    def _take_new_weights(self, version: int) -> None:
        """Drops the keys and values of the previous weights, and copies the new weights to an accelerator."""
        self.prefix, self.weights_version = None, version
        self.kept.close()
        if self.weights is not None and self.model.device.type != "cpu":  # a CPU model uses the shared memory itself
            copy_shared_weights(self.model, self.weights)

    def _end(self) -> None:
        self.speculator.end()
        self.speculator = None
        self.cores.divide(True)

    # ---------------------------------------------------------------- in a call

    def _join(self, message: Message) -> None:
        """Keeps the next tokens of a row until its outcome has been answered."""
        wire.expect(message, Kind.JOIN, self.session, self.round)
        rows, vocab_size = len(self.speculator.finished), self.speculator.drafter.vocab_size
        row, start, tokens, settings, seed = wire.read_join(message.payload, rows, vocab_size)
        options = None if settings is None else read_options(settings)
        self.speculator.join(row, start, tokens, options, seed)
        self.channel.expect()

    def _answer(self, message: Message) -> None:
        outcome, plan = wire.read_outcome(message.payload, len(self.speculator.finished))
        wire.expect(message, Kind.OUTCOME, self.session, self.round)
        self.cores.divide(plan.mode != IN_TURN)
        is_alone = self.speculator.num_workers == 1
        outcome.states = self._receive_states
        found = self.speculator.look_up(outcome, plan)
        self._send(self.speculator.complete(found) if is_alone else found)
        if self.speculator.drafter.reads_target:  # they come before any other message
            self.speculator.catch_up()
        if is_alone and not self.speculator.waits:
            self._prepare(plan)
        else:
            self.channel.expect()

    def _receive_states(self, tokens: int, width: int) -> torch.Tensor:
        message = self.channel.receive(FEATURES_TIMEOUT)
        wire.expect(message, Kind.FEATURES, self.session, self.round)
        return wire.read_features(message.payload, tokens, width)

    def _take_proposals(self, message: Message) -> None:
        """Moves on to the tokens that are verified next, after drafting those that no worker has prepared if asked."""
        wire.expect(message, Kind.SPECULATION, self.session, self.round)
        drafter = self.speculator.drafter
        told = wire.read_speculation(message.payload, len(self.speculator.finished), drafter.vocab_size)
        if not told.record.lookahead:
            self.speculator.take_speculation(padded(told.tokens, told.width), told.record.sources)
        else:
            if drafter.uses_q:  # the target has the distributions of these tokens
                shape = len(told.tokens), told.width, drafter.vocab_size
                told.probabilities = torch.zeros(shape, dtype=torch.float32, device=self.model.device)
            self._send(self.speculator.complete(told, told.record.lookahead))
            if self.speculator.waits:
                return self.channel.expect()
        self._prepare(self.speculator.plan)

    def _prepare(self, plan: Plan) -> None:
        """Grows branches, and looks between two passes whether the next message has arrived."""
        self.round += 1
        self.channel.expect()
        self.speculator.prepare(plan, self.channel.has_arrived)

    def _send(self, speculation: Speculation) -> None:
        """Sends the tokens, with which the target starts, and then their distributions, which it needs later."""
        drafter, announced = self.speculator.drafter, None
        if drafter.uses_q and speculation.width:
            shape = (len(speculation.tokens), speculation.width, drafter.vocab_size)
            to_come = wire.probabilities_to_come(shape, speculation.support)
            announced = Message(Kind.PROBABILITIES, payload=to_come)
        payload = wire.write_speculation(speculation)
        self.channel.send(Message(Kind.SPECULATION, self.session, self.round, payload, announces=announced))
        if announced is not None:  # not packed before, because packing may copy megabytes from a GPU
            q = self.speculator.distributions(speculation)[:, : speculation.width]
            self.channel.send_announced(wire.write_probabilities(q, speculation.support))
