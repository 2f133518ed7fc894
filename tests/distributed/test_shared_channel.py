"""The target's end of a channel in several threads, each with a session of its own."""

import time

import pytest
import torch
from transformers import GenerationConfig

from hf_ssd import SSDConfig
from hf_ssd.distributed import transport
from hf_ssd.distributed.transport import PeerLost
from hf_ssd.distributed.wire import FRAME_LENGTH, Kind, Message, ProtocolError
from hf_ssd.drafting.request import SessionRequest

from ..helpers.channels import SharedEnds, both

COUNT = 40


def start(ends, number):
    ends.channel.start(number, SessionRequest(SSDConfig(), GenerationConfig(), [torch.tensor([0])], 0, 9))
    assert ends.draft.receive(10).session == number


@pytest.fixture
def ends():
    """With two open sessions."""
    ends = SharedEnds()
    start(ends, 1)
    start(ends, 2)
    yield ends
    ends.end()
    for number in (0, 1, 2):
        ends.channel.leave(number, is_reusable=False)


def test_a_message_and_its_payload_are_not_divided(ends):
    def say(number):
        for _ in range(COUNT):
            payload = torch.full((300,), float(number))
            ends.channel.send(Message(Kind.OUTCOME, number, announces=Message(Kind.FEATURES, payload=payload)))

    def listen():
        for _ in range(2 * COUNT):
            message, features = ends.draft.receive(20), ends.draft.receive(20)
            assert (message.kind, features.kind) == (Kind.OUTCOME, Kind.FEATURES)
            assert message.session == features.session and (features.payload == float(message.session)).all()
        return "whole"

    assert both(lambda: say(1), lambda: say(2), listen) == [None, None, "whole"]


def test_a_session_that_waits_beside_another_has_its_own_deadline_and_does_not_spin(ends):
    def wait(number, timeout):
        start, worked = time.monotonic(), time.thread_time()
        with pytest.raises(TimeoutError):
            ends.channel.receive(number, timeout)
        assert time.thread_time() - worked < 0.3
        return time.monotonic() - start

    first, second = both(lambda: wait(1, 1.0), lambda: wait(2, 0.3))
    assert 1.0 <= first < 5 and 0.3 <= second < 0.9
    ends.draft.send(Message(Kind.SPECULATION, 2))  # and nothing is lost
    assert ends.channel.receive(2, 10).session == 2 and not ends.channel.is_broken


def interrupted(ends, monkeypatch, name):
    """Interrupts a session that waits, once, and returns what the other session hears then."""

    def interrupt(*arguments):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(transport, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        ends.channel.receive(1, 10)
    ends.channel.leave(1, is_reusable=True)
    return ends.channel.receive(2, 10)


def test_an_interrupt_loses_nothing_or_ends_the_worker_for_all(ends, monkeypatch):
    ends.draft.send(Message(Kind.SPECULATION, 2, 7))
    assert interrupted(ends, monkeypatch, "wait").round == 7 and ends.process.is_running
    assert ends.draft.receive(10).kind == Kind.END
    start(ends, 1)
    ends.draft.send(Message(Kind.SPECULATION, 2, 8))
    with pytest.raises(PeerLost):
        interrupted(ends, monkeypatch, "unpack")  # the message may be lost
    assert not ends.process.is_running


def test_half_a_message_ends_the_worker_for_all(ends, monkeypatch):
    payload = torch.zeros(9)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ends.channel.channel, "send_announced", lambda payload: (_ for _ in ()).throw(KeyboardInterrupt))
        ends.channel.send(Message(Kind.OUTCOME, 1, announces=Message(Kind.FEATURES, payload=payload)))
    assert not ends.channel.is_alive
    with pytest.raises(PeerLost):
        ends.channel.receive(2, 10)


def test_nonsense_is_an_error_of_who_hears_it_and_ends_the_worker_for_all(ends):
    def listen(number):
        try:
            ends.channel.receive(number, 20)
        finally:
            ends.channel.leave(number, is_reusable=False)

    def say():
        time.sleep(0.2)
        transport.broadcast(ends.draft.outgoing, torch.zeros(FRAME_LENGTH, dtype=torch.uint8), transport.DRAFT).wait()

    first, second, _ = both(lambda: listen(1), lambda: listen(2), say)
    assert {type(first), type(second)} == {ProtocolError, PeerLost} and not ends.process.is_running


def test_an_error_of_no_session_is_everybodys(ends):
    ends.draft.send(Message(Kind.ERROR, 0, payload="cannot read"))
    assert [ends.channel.receive(number, 10).payload for number in (1, 2)] == ["cannot read"] * 2
