"""Calls, interrupts, kills, forks and threads in any order, against a model of what must hold after each of them."""

import contextlib
import faulthandler
import gc
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from functools import cache

import psutil
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

import hf_ssd
from hf_ssd.distributed.assistant import DraftAssistant
from hf_ssd.distributed.sessions import WorkerSession
from hf_ssd.generation import deciding
from hf_ssd.stats import SSDStats

from ..conformance.test_greedy import accepts_one_too_many
from ..helpers.at_length import AtLength
from ..helpers.calls import call
from ..helpers.channels import both
from ..helpers.processes import noted_workers
from ..helpers.tiny import padded_batch, ready, tiny_draft, tiny_model

NEW_TOKENS, PROMPT = 24, 9
ROWS = st.sampled_from([1, 3])
LENGTHS = st.integers(PROMPT, PROMPT + NEW_TOKENS - 2)  # of the output, when something happens
FIXED = {"lookahead": 3, "budget": 8}  # whatever the planner thinks of so small a target
UNIFORM = {"lookahead": 5, "budget": 6, "fan_out": "uniform"}
LOOKUP = {"lookahead": 2, "budget": 6, "fallback": "ngram"}
CONFIGS = st.sampled_from([FIXED, UNIFORM, LOOKUP, {"lookahead": 3, "asynchronous": False}, {}])


@cache
def target():
    return hf_ssd.enable(tiny_model())


@cache
def plain(rows):
    return target().generate(**padded_batch(rows), max_new_tokens=NEW_TOKENS, do_sample=False)


def workers():
    """The worker processes that have not ended, as far as one can know."""
    found = []
    for popen in Calls.started:
        with contextlib.suppress(psutil.NoSuchProcess):
            if popen.poll() is None:
                found.append(psutil.Process(popen.pid))
    return found


def kill_workers():
    for worker in workers():
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()


class Calls(RuleBasedStateMachine):
    """
    The model: whether the assistant is closed. Everything else is to be as if nothing had happened before. An example
    goes on with the assistant of the one before, which takes seconds to start.
    """

    steps: Counter = Counter()
    started: list = []  # the processes of workers
    assistant, closed = None, True

    def __init__(self):
        super().__init__()
        if self.closed:
            self.launch()

    def call(self, rows, config, processor=None, timeout=20.0, **options):
        settings = {"lookahead": "auto", "budget": "auto", **config, "timeout": timeout}
        options = {"max_new_tokens": NEW_TOKENS, "settings": settings, "plain": plain(rows), **options}
        return call(target(), self.assistant, rows, processor, **options).ssd_stats

    is_open = precondition(lambda self: not self.closed)

    @rule(rows=ROWS, config=CONFIGS)
    def generates(self, rows, config):
        self.steps["generates"] += 1
        if self.closed:
            with pytest.raises(ValueError, match="was closed"):
                self.call(rows, config)
        else:
            self.call(rows, config)

    @is_open
    @rule(rows=ROWS)
    def speculates(self, rows):
        self.steps["speculates"] += 1
        # A call may have to be told of a start that failed, or find that a worker was killed a moment ago; the next one
        # starts another worker.
        for _ in range(3):
            ready(self.assistant)
            stats = self.call(rows, FIXED, plain=None)  # the target generates as ever, too
            if stats.draft_joined_at == 0 and stats.draft_failure is None:
                break
        assert stats.draft_failure is None and stats.draft_joined_at == 0 and stats.hit_rate > 0

    @initialize(rows=ROWS)
    def speculates_after_whatever_the_last_example_left(self, rows):
        self.speculates(rows)

    @is_open
    @rule(rows=ROWS, config=CONFIGS, count=st.integers(1, 8))
    def interrupts(self, rows, config, count):
        self.steps["interrupts"] += 1
        left = [count]

        def see(row, tokens):
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.call(rows, config, streamer=hf_ssd.BatchStreamer(see))

    @is_open
    @rule(rows=ROWS, config=CONFIGS, length=LENGTHS)
    def kills_the_worker(self, rows, config, length):
        self.steps["kills_the_worker"] += 1
        self.call(rows, config, AtLength(length, kill_workers))

    @rule()
    def kills_the_worker_between_calls(self):
        self.steps["kills_the_worker_between_calls"] += 1
        kill_workers()

    @is_open
    @rule(rows=ROWS, config=CONFIGS, length=LENGTHS)
    def stops_the_worker(self, rows, config, length):
        self.steps["stops_the_worker"] += 1
        stopped = []

        def stop():
            stopped.extend(workers())
            for worker in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.suspend()

        start = time.monotonic()
        self.call(rows, config, AtLength(length, stop), timeout=0.1)
        assert time.monotonic() - start < 30
        for worker in stopped:  # one that was starting goes on
            if worker.is_running():
                worker.send_signal(signal.SIGCONT)

    @is_open
    @rule(rows=ROWS, config=CONFIGS, length=LENGTHS, kills=st.booleans())
    def generates_in_two_threads(self, rows, config, length, kills):
        self.steps["generates_in_two_threads"] += 1
        reached, over = threading.Event(), threading.Event()

        def first():
            try:
                return self.call(rows, config, AtLength(length, lambda: (reached.set(), over.wait(60))))
            finally:
                reached.set()

        def second():
            assert reached.wait(60)
            try:
                return self.call(rows, config, AtLength(length, kill_workers) if kills else None)
            finally:
                over.set()

        results = both(first, second)
        assert all(isinstance(result, SSDStats) for result in results), results

    @rule(rows=ROWS, config=CONFIGS)
    def forks(self, rows, config):
        self.steps["forks"] += 1
        crash = tempfile.TemporaryFile()
        pid = os.fork()
        if not pid:
            try:
                faulthandler.enable(crash)
                try:
                    self.call(rows, config)
                except ValueError as error:
                    assert "after forking" in str(error)
                    self.assistant.close()
                    Calls.assistant = None
                    gc.collect()
                    os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(pid, 0)[1]
        crash.seek(0)
        assert status == 0, crash.read().decode()

    @is_open
    @rule()
    def closes(self):
        self.steps["closes"] += 1
        self.assistant.close()
        Calls.closed = True
        assert not workers()

    @precondition(lambda self: self.closed)
    @rule()
    def launch(self):
        self.steps["launch"] += 1
        Calls.assistant, Calls.closed = hf_ssd.launch_draft(tiny_draft(), num_threads=1), False

    @invariant()
    def nothing_is_left_behind(self):
        assert len(workers()) <= (0 if self.closed else 1)
        channels = [worker.channel for worker in self.assistant.workers if worker.channel is not None]
        assert not any(channel.inboxes for channel in channels)  # no session is open


def run(examples, steps):
    """Returns how often there was what."""
    Calls.steps.clear()
    gc.collect()  # so that a forked process does not have to collect what other tests have left
    how = {"derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}
    how |= {"phases": [Phase.generate]}
    with pytest.MonkeyPatch.context() as patch:
        Calls.started = noted_workers(patch)
        try:
            run_machine(Calls, settings=settings(max_examples=examples, stateful_step_count=steps, **how))
        finally:
            Calls.assistant.close()
            Calls.closed = True
            left = workers()
            kill_workers()
    assert not left
    return Calls.steps


forking = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")


@forking
def test_some_dozens_of_steps():
    steps = run(examples=3, steps=8)
    assert steps.total() > 12 and steps["speculates"]


@forking
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_steps():
    steps = run(examples=80, steps=20)  # how many each has depends on what has ended by then
    print(dict(steps))
    assert steps.total() > 1000 and len(steps) == 10


@pytest.mark.slow
@forking
@pytest.mark.parametrize(
    "where, what, mistake",
    [
        (deciding, "verify_greedy", accepts_one_too_many),
        (WorkerSession, "close", lambda self: None),
        (DraftAssistant, "_restart", lambda self: None),
    ],
)
def test_mistakes_are_noticed(monkeypatch, where, what, mistake):
    """The mutants: verification accepts one too many, a session never ends, a worker that has ended is not replaced."""
    monkeypatch.setattr(where, what, mistake)
    with pytest.raises((AssertionError, ValueError, Flaky)):  # flaky: another example has left behind what is wrong
        run(examples=40, steps=8)
