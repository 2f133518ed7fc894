"""A draft server whose messages are damaged answers with an error or drops them, and serves the next good call."""

import random
import threading
import time

import pytest
import torch

from hf_ssd.distributed import wire
from hf_ssd.distributed.transport import TARGET, PeerLost, broadcast
from hf_ssd.distributed.wire import FRAME_LENGTH, HEADER, Kind, Message, pack
from hf_ssd.rounds import AHEAD, Outcome, Plan

from ..helpers.channels import channel_ends
from ..helpers.thread_worker import STOP, StoppableServer
from ..helpers.tiny import VOCAB, tiny_draft
from .conftest import ROWS, damaged, frames_of

HARMFUL = {int(STOP)}  # what ends the server


@pytest.fixture
def server():
    (target, draft), stopped = channel_ends(), []

    def serve():
        with pytest.raises(PeerLost):
            StoppableServer(draft, tiny_draft()).serve()
        stopped.append(True)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield target
    target.send(Message(STOP))
    thread.join(30)
    assert stopped
    target.close()
    draft.close()


def good_call(target, number, start):
    """A call of one round, answered as always."""
    target.send(Message(Kind.START, number, payload=start))
    outcome = Outcome([[5], [6]])
    target.send(Message(Kind.OUTCOME, number, payload=wire.write_outcome(outcome, Plan(AHEAD, 3, 3, 4))))
    message, errors = next_of(target, number)
    tokens = wire.read_speculation(message.payload, ROWS).tokens
    assert all(0 <= token < VOCAB for of_row in tokens for token in of_row)
    target.send(Message(Kind.END, number))
    return tokens, errors


def next_of(target, number):
    errors, deadline = 0, time.monotonic() + 30
    while True:
        message = target.receive(deadline - time.monotonic())
        if message.kind == Kind.SPECULATION and message.session == number:
            return message, errors
        errors += message.kind == Kind.ERROR


def say(channel, tensors):
    channel.sent += [(broadcast(channel.outgoing, tensor, TARGET), tensor) for tensor in tensors]


def damage_frame(frame, chance):
    """In its header or what it holds; its length, type and place stay, or the next message would be taken for it."""
    frame = frame.clone()
    for _ in range(chance.randint(1, 3)):
        numbers = frame.view(torch.int64)
        place = chance.choice([0, 1, 2, 3, 4, *range(HEADER.size // 8, HEADER.size // 8 + 12)])
        numbers[place] = chance.choice([-1, 0, 1, 2, 3, 5, 14, 19, 97, 2**31, 2**62, -(2**63)])
    if int(numbers[2]) in HARMFUL:
        numbers[2] = 99
    return frame


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_damaged_messages_do_not_end_a_server(recorded, server):
    calls = 2000
    chance, errors = random.Random(calls), 0
    usable = [one for one in recorded if one.message.kind in (Kind.OUTCOME, Kind.SPECULATION, Kind.END)]
    starts = [one.message.payload for one in recorded if one.message.kind == Kind.START]
    expected, _ = good_call(server, 1, starts[0])
    for number in range(2, 2 * calls + 2, 2):
        start = Message(Kind.START, number, payload=chance.choice(starts))  # of one worker, or one of two
        say(server, pack(start) if chance.random() < 0.7 else frames_of(start, damaged(start.payload, chance)))
        for _ in range(chance.randint(1, 4)):
            one = chance.choice(usable)
            message = Message(one.message.kind, number, chance.choice([0, one.message.round]), one.message.payload)
            if chance.random() < 0.5:
                frames = frames_of(message, damaged(message.payload, chance))
            else:
                frames = pack(message)
                if len(frames) == 1:
                    frames = [damage_frame(frames[0], chance)]
            say(server, frames)
        tokens, found = good_call(server, number + 1, starts[0])
        errors += found
        assert tokens == expected
    assert errors > calls // 4


def test_a_frame_that_is_none_is_answered_with_an_error(server):
    say(server, [torch.full((FRAME_LENGTH,), 7, dtype=torch.uint8)])
    message = server.receive(10)
    assert (message.kind, message.session) == (Kind.ERROR, 0)
    assert "does not come from hf_ssd" in message.payload
