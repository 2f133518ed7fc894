"""Tokens leave before anything is done with what they were drawn from."""

from types import SimpleNamespace

import pytest
import torch

from hf_ssd.cache.speculation import Speculation
from hf_ssd.distributed import payloads
from hf_ssd.distributed.draft_server import DraftServer
from hf_ssd.distributed.messages import Kind

ROWS, LOOKAHEAD, VOCAB = 2, 3, 40


class Recorder:
    """Stands in for the channel, and writes down what it is given."""

    def __init__(self, link, events):
        self.link, self.events = link, events

    def send(self, message):
        self.events.append(message)

    def send_announced(self, payload):
        self.events.append(payload)


@pytest.mark.parametrize("link", [None, "a link"])
@pytest.mark.parametrize("support", [VOCAB, 4])
def test_what_tokens_were_drawn_from_is_announced_with_them_and_packed_afterwards(link, support, monkeypatch):
    events, pack = [], payloads.probabilities_to_payload
    monkeypatch.setattr(payloads, "probabilities_to_payload", lambda *rest: events.append("packs") or pack(*rest))
    server = DraftServer(Recorder(link, events), None)
    server.speculator = SimpleNamespace(vocab_size=VOCAB, rest=0)
    q = torch.zeros(ROWS, LOOKAHEAD, VOCAB)
    q[..., :support] = torch.rand(ROWS, LOOKAHEAD, support)
    speculation = Speculation(torch.ones(ROWS, LOOKAHEAD, dtype=torch.long), q, torch.ones(ROWS, dtype=torch.bool))
    server._send_with_probabilities(speculation, budget=5)
    tokens, packs, payload = events
    assert (tokens.kind, tokens.announces.kind, packs) == (Kind.SPECULATION, Kind.PROBABILITIES, "packs")
    announced = tokens.announces.payload
    assert (announced.shape, announced.dtype) == (payload.shape, payload.dtype)
    assert tokens.announces.over_link == bool(link)
    # Over a link nothing is asked of the device, so all of the vocabulary travels.
    assert len(payload) == ROWS * LOOKAHEAD * (VOCAB if link or support == VOCAB else 2 * support)
    assert torch.equal(payloads.payload_to_probabilities(payload, tuple(q.shape)), q)
    answer = payloads.payload_to_answer(tokens.payload, ROWS)
    assert torch.equal(answer.tokens, speculation.tokens) and answer.hits.all() and answer.budget == 5
