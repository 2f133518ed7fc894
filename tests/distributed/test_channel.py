"""Two ends of a channel in two threads. What a killed or silent peer does to a call is in tests/faults."""

import inspect
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hf_ssd.distributed import transport
from hf_ssd.distributed.wire import Kind, Message, ProtocolError

from ..helpers.channels import channel_ends
from ..helpers.programs import run


@pytest.fixture
def ends():
    ends = channel_ends()
    yield ends
    for end in ends:
        end.close()


def test_a_message_that_comes_as_the_wait_ends_is_not_lost(ends):
    target, draft = ends
    for i in range(200):
        sender = threading.Timer(0.002, target.send, [Message(Kind.OUTCOME, 1, i)])
        sender.start()
        while True:
            try:
                assert draft.receive(0.002).round == i
                break
            except TimeoutError:
                pass
        sender.join()


@pytest.mark.skipif(not hasattr(os, "sched_yield"), reason="there is no other way to let others run")
def test_a_core_that_waits_for_a_message_does_not_sleep(monkeypatch):
    def naps():
        slept, looks = [], iter([False] * 20 + [True] * 2)
        work = SimpleNamespace(is_completed=lambda: next(looks), wait=lambda timeout: True)
        with monkeypatch.context() as patch:
            patch.setattr("hf_ssd.distributed.transport.time.sleep", slept.append)
            inspect.unwrap(transport.wait)(work, float("inf"), awake=60)
        return len(slept)

    assert naps() == 0
    monkeypatch.setattr("hf_ssd.distributed.transport._let_others_run", lambda: time.sleep(0))  # the mutant
    assert naps() == 20


def test_an_announced_payload_arrives_while_no_one_looks(ends):
    target, draft = ends
    for round_ in range(3):
        q = torch.rand(30_000)
        probabilities = Message(Kind.PROBABILITIES, 1, round_, q)
        target.send(Message(Kind.SPECULATION, 1, round_, list(range(9)), announces=probabilities))
        target.send_announced(q)
        assert len(draft.receive(10).payload) == 9
        draft.expect()
        time.sleep(0.1)
        deadline = time.monotonic() + 5
        while not draft.has_arrived() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert draft.pending is not None and torch.equal(draft.pending[1], q)
        received = draft.receive(10)
        assert (received.kind, received.session, received.round) == (Kind.PROBABILITIES, 1, round_)
        assert torch.equal(received.payload, q)


def test_what_was_announced_can_be_waited_for_again_and_dropped(ends):
    """The target's wait for probabilities may run out, and a call that is broken off leaves them unread."""
    target, draft = ends
    q = torch.rand(200)
    target.send(Message(Kind.SPECULATION, announces=Message(Kind.PROBABILITIES, payload=q.to("meta"))))
    assert draft.receive(10).kind == Kind.SPECULATION
    for _ in range(2):
        with pytest.raises(TimeoutError):
            draft.receive(0.02)
        assert not draft.has_arrived()
    with pytest.raises(ProtocolError, match="in the place of the payload"):
        target.send(Message(Kind.ERROR))
    target.send_announced(q)
    target.send(Message(Kind.END))
    assert torch.equal(draft.receive(10).payload, q) and draft.receive(10).kind == Kind.END


SINGLE_CORE = """
import os, sys, torch.distributed as dist
from hf_ssd.distributed import transport
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
os.sched_setscheduler(0, int(sys.argv[2]), os.sched_param(0))
before = set(os.listdir("/proc/self/task"))
with transport._threads_that_let_compute():
    device = dist.ProcessGroupGloo.create_device(hostname=transport.LOOPBACK, lazy_init=False)
made = set(os.listdir("/proc/self/task")) - before
print(sorted({os.sched_getscheduler(int(thread)) for thread in made}), os.sched_getscheduler(0))
"""
linux = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux tells its scheduler who may interrupt")


@linux
@pytest.mark.parametrize(
    "cores, policy, of_threads", [(1, "OTHER", "BATCH"), (2, "OTHER", "OTHER"), (1, "BATCH", "BATCH")]
)
def test_who_computes_on_the_only_core_is_not_interrupted(cores, policy, of_threads):
    if len(os.sched_getaffinity(0)) < cores:
        pytest.skip("there is one core")
    theirs, own = getattr(os, f"SCHED_{of_threads}"), getattr(os, f"SCHED_{policy}")
    assert run("-c", SINGLE_CORE, cores, own, timeout=60) == f"[{theirs}] {own}\n"


@linux
def test_a_scheduler_that_takes_no_orders_is_no_obstacle(monkeypatch):
    def refuse(*_):
        refused.append(True)
        raise PermissionError("not in this container")

    refused = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with transport._threads_that_let_compute():
        assert dist.ProcessGroupGloo.create_device(hostname=transport.LOOPBACK, lazy_init=False)
    assert refused
