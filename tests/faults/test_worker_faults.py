"""Real workers that are killed, stopped or made to raise. A failed draft costs speed, not tokens."""

import os
import signal
import threading
import time

import pytest

import hf_ssd

from ..helpers.at_length import AtLength
from ..helpers.calls import call
from ..helpers.channels import both
from ..helpers.programs import run
from ..helpers.tiny import ready, tiny_draft


@pytest.fixture
def assistant(assistant):
    """The one that all tests share. Its worker lives before a test and after it."""
    yield ready(assistant)
    ready(assistant)


def generate(target, assistant, processor=None, rows=2, new_tokens=30, **settings):
    return call(target, assistant, rows, processor, max_new_tokens=new_tokens, settings=settings).ssd_stats


@pytest.mark.parametrize("length", [None, 9, 20], ids=["between calls", "before the first round", "in the middle"])
def test_a_killed_worker_costs_no_tokens_and_the_next_call_has_a_new_one(target, assistant, length, warnings):
    first, start = assistant.workers[0].process.popen, time.monotonic()
    if length is None:
        first.kill()
        first.wait()
        assert generate(target, assistant).draft_failure is None
        assert warnings == ["The draft worker had ended; starting another one."]
    else:
        stats = generate(target, assistant, processor=AtLength(length, first.kill))
        assert "has ended" in stats.draft_failure and len(warnings) == 1 and "plain decoding" in warnings[0]
    assert time.monotonic() - start < 10  # it is noticed at once
    stats = generate(target, ready(assistant))
    assert stats.draft_failure is None and stats.hit_rate > 0 and assistant.workers[0].process.popen.pid != first.pid


def test_a_stopped_worker_is_given_up_after_the_timeout(target, assistant, warnings):
    pid = assistant.workers[0].process.popen.pid
    start = time.monotonic()
    stats = generate(target, assistant, processor=AtLength(15, lambda: os.kill(pid, signal.SIGSTOP)), timeout=1.0)
    assert "did not answer within 1 s" in stats.draft_failure and len(warnings) == 1
    assert 1 <= time.monotonic() - start < 20
    assert assistant.workers[0].process.popen.poll() is not None  # it is not left behind, stopped


def test_on_draft_failure_raise(target, assistant):
    kill = AtLength(15, assistant.workers[0].process.popen.kill)
    with pytest.raises(hf_ssd.DraftError, match="has ended"):
        generate(target, assistant, processor=kill, on_draft_failure="raise")
    assert generate(target, ready(assistant)).hit_rate > 0


@pytest.mark.slow
def test_late_answers_to_an_old_call_are_dropped(target, assistant):
    """A call that is broken off between rounds leaves an answer on its way."""

    for length in (9, 10, 15):
        with pytest.raises(ZeroDivisionError):
            generate(target, assistant, processor=AtLength(length, lambda: 1 / 0))
        assert generate(target, assistant).hit_rate > 0


@pytest.fixture
def ctrl_c():
    """As in a terminal: a shell lets programs that it starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("stopped", [False, True])
def test_ctrl_c_is_obeyed_at_once_and_the_next_call_works(target, assistant, stopped, ctrl_c):
    def interrupt():
        if stopped:
            os.kill(assistant.workers[0].process.popen.pid, signal.SIGSTOP)
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        generate(target, assistant, new_tokens=230, processor=AtLength(12, interrupt), rows=1, timeout=60.0)
    assert time.monotonic() - start < 10
    assert generate(target, ready(assistant)).hit_rate > 0


# ---------------------------------------------------------------- the end of an assistant, workers that do not start


DROPPED = """
import gc, pytest, hf_ssd
from tests.helpers.tiny import tiny_draft, tiny_model
from tests.faults.test_worker_faults import AtLength, generate
target, assistant = hf_ssd.enable(tiny_model()), hf_ssd.launch_draft(tiny_draft(), num_threads=1)
with pytest.raises(ZeroDivisionError):
    generate(target, assistant, processor=AtLength(14, lambda: 1 / 0))
worker = assistant.workers[0].process.popen
del assistant
gc.collect()
assert worker.poll() is not None
print("dropped", flush=True)
"""


def test_an_assistant_that_no_one_closed_can_be_dropped_while_its_draft_waits():
    """In a process of its own: a gloo group that waits for a message that never comes waits in C++."""
    assert "dropped" in run("-c", DROPPED, timeout=120)


def test_closing_while_another_thread_generates_costs_no_tokens(target, warnings):
    assistant = hf_ssd.launch_draft(tiny_draft(), num_threads=1)
    process, reached, closed = assistant.workers[0].process, threading.Event(), threading.Event()

    def wait_for_the_end():
        reached.set()
        assert closed.wait(60)

    def close():
        assert reached.wait(60)
        assistant.close()
        closed.set()

    hold = AtLength(15, wait_for_the_end)
    stats, _ = both(lambda: generate(target, assistant, processor=hold), close)
    assert "has ended" in stats.draft_failure
    with pytest.raises(ValueError, match="was closed"):
        generate(target, assistant)
    assert not process.is_running and assistant.workers[0].process is process  # no other was started
    assistant.close()


def test_a_worker_that_cannot_be_started_again_costs_no_tokens(target, assistant, warnings, monkeypatch):
    def fails():
        raise OSError("too many open files")

    assistant.workers[0].process.popen.kill()
    assistant.workers[0].process.popen.wait()
    with monkeypatch.context() as patched:
        patched.setattr(assistant.workers[0], "launch", fails)
        assert "could not be started: too many open files" in generate(target, ready(assistant)).draft_failure
        assert len(warnings) == 2 and "plain decoding" in warnings[1]
        with pytest.raises(hf_ssd.DraftError, match="too many open files"):
            generate(target, ready(assistant), on_draft_failure="raise")
    assert generate(target, ready(assistant)).hit_rate > 0
