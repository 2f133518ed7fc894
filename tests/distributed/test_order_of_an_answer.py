"""Tokens leave before anything is done with what they were drawn from."""

from types import SimpleNamespace

import pytest
import torch

from hf_ssd.distributed import wire
from hf_ssd.distributed.draft_server import DraftServer
from hf_ssd.distributed.wire import Kind
from hf_ssd.rounds import AHEAD, PREPARED, RoundRecord, Speculation

ROWS, LOOKAHEAD, VOCAB = 2, 3, 40


class Recorder:
    """Stands in for the channel, and writes down what it is given."""

    def __init__(self, events):
        self.events = events

    def send(self, message):
        self.events.append(message)

    def send_announced(self, payload):
        self.events.append(payload)


def server_with(channel, sampled=True):
    """A server in the middle of a call."""
    server = DraftServer(channel, None)
    drafter = SimpleNamespace(sampled=sampled, vocab_size=VOCAB)
    server.speculator = SimpleNamespace(drafter=drafter, distributions=lambda speculation: speculation.probabilities)
    return server


@pytest.mark.parametrize("support", [VOCAB, 4])
def test_what_tokens_were_drawn_from_is_announced_with_them_and_packed_afterwards(support, monkeypatch):
    events, pack = [], wire.write_probabilities
    monkeypatch.setattr(wire, "write_probabilities", lambda *rest: events.append("packs") or pack(*rest))
    server = server_with(Recorder(events))
    q = torch.zeros(ROWS, LOOKAHEAD, VOCAB)
    q[..., :support] = torch.rand(ROWS, LOOKAHEAD, support)
    record = RoundRecord(AHEAD, LOOKAHEAD, 5, [PREPARED] * ROWS)
    speculation = Speculation([[1] * LOOKAHEAD] * ROWS, q, record, support)
    server._send(speculation)
    tokens, packs, payload = events
    assert (tokens.kind, tokens.announces.kind, packs) == (Kind.SPECULATION, Kind.PROBABILITIES, "packs")
    announced = tokens.announces.payload
    assert (announced.shape, announced.dtype) == (payload.shape, payload.dtype)
    assert len(payload) == ROWS * LOOKAHEAD * (2 * support if support < VOCAB else VOCAB)
    assert torch.equal(wire.read_probabilities(payload, tuple(q.shape)), q)
    told = wire.read_speculation(tokens.payload, ROWS)
    assert told.tokens == speculation.tokens and told.record.hits == [True] * ROWS
    assert told.record.budget == 5


def test_nothing_is_announced_where_tokens_were_certain():
    events, record = [], RoundRecord(AHEAD, LOOKAHEAD, 5, [PREPARED] * ROWS)
    server_with(Recorder(events), sampled=False)._send(Speculation([[1] * LOOKAHEAD] * ROWS, None, record))
    assert len(events) == 1 and events[0].announces is None
