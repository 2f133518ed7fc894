"""What the target makes of messages that are late, foreign, truncated or out of turn."""

import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

import hf_ssd
from hf_ssd.distributed import wire
from hf_ssd.distributed.sessions import WorkerSession
from hf_ssd.distributed.transport import DRAFT, broadcast
from hf_ssd.distributed.wire import Kind, Message
from hf_ssd.drafting.request import SessionRequest
from hf_ssd.rounds import AHEAD, NOTHING, PREPARED, Outcome, Plan, RoundRecord, Speculation

from ..helpers.channels import SharedEnds

NUMBER, ROWS = 5, 2


def speculation(tokens):
    return wire.write_speculation(Speculation(tokens, None, RoundRecord(sources=[PREPARED, NOTHING])))


class Line(SharedEnds):
    """A session whose other end is played by the test."""

    def __init__(self):
        super().__init__()
        worker = SimpleNamespace(channel=self.channel, worker_info={})
        request = SessionRequest(hf_ssd.SSDConfig(timeout=2.0), GenerationConfig(), [torch.tensor([1])] * ROWS, 0, 9)
        self.session = WorkerSession(worker, NUMBER, request)
        self.session.begin()
        for _ in range(3):
            self.session.send_outcome(Outcome([[3], [4]]), Plan(AHEAD, 2, 2, 4))
        assert self.session.round == 2

    def say(self, kind=Kind.SPECULATION, session=NUMBER, round_=2, payload=None, change=None):
        payload = speculation([[1, 2], [3, round_]]) if payload is None else payload
        frames = wire.pack(Message(kind, session, round_, payload))
        if change is not None:
            frames[0][: wire.HEADER.size].view(torch.int64)[change[0]] = change[1]
        for frame in frames:
            broadcast(self.draft.outgoing, frame, DRAFT).wait()


@pytest.fixture
def line():
    line = Line()
    yield line
    line.draft.close()
    line.target.close()


@pytest.mark.parametrize("others", [0, 2])
def test_a_worker_that_is_busy_with_other_calls_has_the_time_for_them_too(line, others):
    for number in range(others):
        line.session.channel.inboxes[100 + number] = deque()
    line.session.timeout, late = 0.5, threading.Timer(0.9, line.say)
    late.start()
    if others:
        assert line.session.receive_speculation().tokens == [[1, 2], [3, 2]]
    else:
        with pytest.raises(hf_ssd.DraftError, match="did not answer within 0.5 s"):
            heard(line, {"round_": 1})  # which is late itself
        line.session.close()
        assert not line.process.is_running
    late.cancel()


def heard(line, *sayings):
    """Says something from another thread, as the other end would, and returns the answer that the session takes."""
    thread = threading.Thread(target=lambda: [line.say(**saying) for saying in sayings], daemon=True)
    thread.start()
    return line.session.receive_speculation()


@pytest.mark.parametrize(
    "late",
    [
        {"round_": 1},
        {"session": NUMBER - 1, "round_": 7},
        {"session": NUMBER - 1, "kind": Kind.ERROR},
        {"kind": Kind.PROBABILITIES, "round_": 1, "payload": [1.0] * 300},
    ],
    ids=str,
)
def test_late_answers_are_dropped(line, late):
    assert heard(line, late, late, {}).tokens == [[1, 2], [3, 2]]
    line.session.close()
    assert line.process.is_running


@pytest.mark.parametrize(
    "saying, words",
    [
        ({"round_": 3}, "expected SPECULATION of session 5, round 2"),
        ({"kind": Kind.PROBABILITIES, "payload": [1.0] * 300}, "received PROBABILITIES of session 5"),
        ({"change": (0, 1234)}, "does not come from hf_ssd"),
        ({"payload": [3, 4]}, r"\[3, 4\] cannot be a speculation"),
        ({"payload": speculation([[1, 2]])}, r"\[-1\] cannot be the ranks of a speculation"),
        ({"payload": speculation([[1, 2], [3, 9]])}, r"\[3, 9\] are not numbers from 0 to 8"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_named_and_not_acted_on(line, saying, words):
    with pytest.raises(hf_ssd.DraftError, match=f"something unexpected: .*{words}"):
        heard(line, saying)
    line.session.close()
    assert not line.process.is_running  # the next call has another worker


def test_the_next_message_can_arrive_while_the_target_computes_also_in_greedy_calls(line):
    heard(line, {})
    threading.Thread(target=line.say, daemon=True).start()
    deadline = time.monotonic() + 20
    while not line.target.has_arrived():
        assert time.monotonic() < deadline
