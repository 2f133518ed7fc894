"""The loop in which the draft serves generate() calls: receive, answer, prepare, and so on."""

import traceback

import torch
from transformers import PreTrainedModel

from ..drafting.needs import DraftInfo
from ..drafting.speculator import Speculator
from ..drafting.verified_prefix import VerifiedPrefix
from ..drafting.vocabulary import Translation
from ..rounds import Speculation
from . import wire
from .channel import Channel, PeerLost
from .device_link import LINK_TIMEOUT
from .drafts import Drafts
from .session import SessionRequest
from .shared_weights import copy_shared_weights
from .wire import Kind, Message

PROMPTS_TIMEOUT = 10.0  # seconds for the prompts to follow the request
FEATURES_TIMEOUT = 10.0  # seconds for the target's features to follow the outcome


class DraftServer:
    """
    Serves generate() calls in turn over a channel.

    Args:
        channel (`Channel`): The channel to the target.
        model (`PreTrainedModel`): The draft model.
        weights (`dict`, *optional*): The description of the [`SharedWeights`] that the model was built from, if any.
    """

    def __init__(self, channel: Channel, model: PreTrainedModel, weights: dict | None = None):
        self.channel, self.model, self.drafts = channel, model, Drafts()
        self.prefix: VerifiedPrefix | None = None  # of the last call, which the next call may continue
        self.weights, self.weights_version = weights, None if weights is None else weights["version"]
        self.speculator: Speculator | None = None
        self.request: SessionRequest | None = None
        self.translation: Translation | None = None  # for calls whose tokenizers differ
        self.costs: tuple[float, float, float] | None = None  # sent with the next answer
        self.session = self.round = 0
        self.found: Speculation | None = None  # until the target says which tokens it verifies

    @torch.inference_mode()
    def serve(self) -> None:
        """
        Serves calls until the target sends `STOP`.

        Raises:
            [`PeerLost`]: the target's process has ended.
        """
        while True:
            message = Message(Kind.ERROR)  # errors belong to no call until a message was read
            try:
                if self.speculator is None:  # between calls the wait sleeps
                    message = self.channel.receive(timeout=None, awake=0.0)
                else:
                    message = self.channel.receive(timeout=None)
                if message.kind == Kind.STOP and not message.session:
                    return
                self._handle(message)
            except PeerLost:
                raise
            except Exception:
                self.speculator = self.prefix = None
                text = wire.write_text(traceback.format_exc())
                self.channel.send(Message(Kind.ERROR, message.session, message.round, text))

    def _handle(self, message: Message) -> None:
        if message.kind == Kind.START:
            self._start(message)
        elif message.kind == Kind.END:
            self._end(message)
        elif message.kind == Kind.LINK:
            wire.expect(message, Kind.LINK, 0, 0, length=0)
            self._link()
        elif message.kind == Kind.VOCABULARY:
            wire.expect(message, Kind.VOCABULARY, 0, 0)
            own = self.model.config.get_text_config(decoder=True).vocab_size
            self.translation = wire.read_translation(message.payload, own)
        elif message.session == self.session and self.speculator is not None:
            if message.kind == Kind.OUTCOME:
                self._answer(message)
            elif message.kind == Kind.SPECULATION:
                self._verify(message)
        # Other messages belong to a call that failed or was interrupted, and are dropped.

    def _link(self) -> None:
        works = self.channel.open_link(self.model.device)
        self.channel.send(Message(Kind.LINK, payload=wire.write_json(works)))
        verdict = self.channel.receive(2 * LINK_TIMEOUT)
        wire.expect(verdict, Kind.LINK, 0, 0)
        if not wire.read_json(verdict.payload):
            self.channel.close_link()

    def _start(self, message: Message) -> None:
        self.speculator = None
        prompts = self.channel.receive(timeout=PROMPTS_TIMEOUT)
        while prompts.kind == Kind.START:  # the previous call ended before it sent prompts, or was no call
            message, prompts = prompts, self.channel.receive(timeout=PROMPTS_TIMEOUT)
        wire.expect(prompts, Kind.PROMPTS, message.session, message.round)
        rows = wire.read_prompts(prompts.payload)
        request = SessionRequest.from_dict(wire.read_json(message.payload), rows, self.translation)
        longest = request.generation_config.max_length or 0
        features = len(rows) * longest * DraftInfo.of(self.model.config).target_width
        self.channel.make_room(len(rows), request.vocab_size, features)
        self.request, self.session, self.round = request, message.session, 0
        if request.weights_version != self.weights_version:
            self._take_new_weights(request.weights_version)
        speculator = self.drafts.speculator(self.model, request, earlier=self.prefix)
        self.prefix = speculator.drafter.prefix
        speculator.begin()
        self.channel.expect()
        if request.profile:
            self.costs = speculator.profile(self.channel.has_arrived)
        else:
            speculator.prepare(request.plan, self.channel.has_arrived)
        self.speculator = speculator

    def _take_new_weights(self, version: int) -> None:
        """Drops the keys and values of the previous weights, and copies the new weights to an accelerator."""
        self.prefix, self.weights_version = None, version
        if self.weights is not None and self.model.device.type != "cpu":  # a CPU model uses the shared memory itself
            copy_shared_weights(self.model, self.weights)

    def _end(self, message: Message) -> None:
        if self.speculator is not None and message.session == self.session:
            self.speculator.end()
        self.speculator = self.found = None
        if self.channel.link is not None:
            self.channel.send(Message(Kind.END, message.session))

    def _answer(self, message: Message) -> None:
        speculator = self.speculator
        outcome, plan = wire.read_outcome(message.payload, len(speculator.finished))
        wire.expect(message, Kind.OUTCOME, self.session, self.round)
        found = speculator.look_up(outcome, plan, self._receive_features)
        if self.request.answers_alone:
            self._send(speculator.complete(found))
            self._take_in_features()
            self._prepare()
        else:
            self.found = found
            self._send(found)
            self._take_in_features()
            self.channel.expect()

    def _receive_features(self, tokens: int, width: int) -> torch.Tensor:
        message = self.channel.receive(FEATURES_TIMEOUT)
        wire.expect(message, Kind.FEATURES, self.session, self.round)
        return wire.read_features(message.payload, tokens, width)

    def _take_in_features(self) -> None:
        """Receives the features, unless the answer has needed them: they come before any other message."""
        if self.speculator.drafter.needs.hidden_states:
            self.speculator.catch_up()

    def _verify(self, message: Message) -> None:
        """Moves on to the tokens that are verified next, and drafts the missing tokens."""
        wire.expect(message, Kind.SPECULATION, self.session, self.round)
        speculator, own = self.speculator, self.found
        verified = wire.read_speculation(message.payload, len(speculator.finished))
        width = verified.record.lookahead
        if min(map(len, verified.tokens)) < width:
            if speculator.drafter.sampled:  # the target has the distributions of other workers
                shape = (len(verified.tokens), verified.width, speculator.drafter.vocab_size)
                verified.probabilities = torch.zeros(shape, dtype=torch.float32, device=self.model.device)
                q = speculator.distributions(own)
                if q is not None:  # more tokens may be prepared than the new plan asks for
                    grown = min(q.shape[1], verified.width)
                    verified.probabilities[:, :grown] = q[:, :grown]
            self._send(speculator.complete(verified, width))
        else:
            speculator.verify(verified.tokens, verified.record.sources)
        self._prepare()

    def _prepare(self) -> None:
        self.round, self.found = self.round + 1, None
        self.channel.expect()
        self.speculator.prepare(self.speculator.plan, self.channel.has_arrived)

    def _send(self, speculation: Speculation) -> None:
        """
        Sends the tokens first, because the target can start with them and needs their distributions only at the end of
        its forward pass. The distributions are announced, so that they can arrive meanwhile. They are packed after the
        tokens have been sent, because packing may copy megabytes from a GPU.
        """
        speculation.costs, self.costs = self.costs, None
        drafter, announced = self.speculator.drafter, None
        if drafter.sampled and speculation.width:
            over_link, support = self.channel.link is not None, speculation.support
            if over_link:
                support = drafter.vocab_size
            elif support is None:
                support = int(wire.largest_support(speculation.probabilities))
            shape = (len(speculation.tokens), speculation.width, drafter.vocab_size)
            to_come = wire.probabilities_to_come(shape, support)
            announced = Message(Kind.PROBABILITIES, self.session, self.round, to_come, over_link)
        payload = wire.write_speculation(speculation)
        self.channel.send(Message(Kind.SPECULATION, self.session, self.round, payload, announces=announced))
        if announced is not None:
            q = self.speculator.distributions(speculation)
            self.channel.send_announced(wire.write_probabilities(q, support))
