"""A draft that rests is not asked, and catches up afterwards."""

import math
import statistics
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hf_ssd.distributed.conversation import Conversation
from hf_ssd.drafting.planner import Plan, Planner
from transformers import set_seed
from transformers.generation.streamers import BaseStreamer

import hf_ssd
from hf_ssd.distributed import client, messages, payloads
from hf_ssd.distributed.assistant import DraftAssistant
from hf_ssd.distributed.channel import AWAKE, Channel
from hf_ssd.distributed.connection import Connection
from hf_ssd.distributed.draft_server import WARM_UP, DraftServer
from hf_ssd.distributed.messages import Kind, Message
from hf_ssd.drafting import experience
from hf_ssd.drafting.speculator import Speculator

from ..conftest import VOCAB, padded_batch, tiny_model

RESTING, DRAFTING = 6, 3  # rounds


class InAndOut(Planner):
    """Rests for six rounds, drafts for three, and so on."""

    adapts_tokens = True
    seen = []

    def __init__(self, *_):
        self.rounds = 0
        InAndOut.seen = []

    @property
    def phase(self):
        return self.rounds % (RESTING + DRAFTING)

    def plan(self):
        lookahead = 0 if self.phase < RESTING else 3
        self.current = Plan(lookahead, 4 if lookahead else 0, "primary", 1.0, 0.8, 0.5)
        return self.current

    def lookahead(self, known):
        return self.current.lookahead

    @property
    def rest(self):
        return max(0, RESTING - self.phase - 2) if self.current.lookahead == 0 else 0

    rest_seconds = math.inf

    def observe(self, round_):
        self.rounds += 1
        InAndOut.seen.append(round_)


class ThreadWorker(Connection):
    """A worker in a thread of this process, which a test can change."""

    def __init__(self, draft):
        super().__init__(process=None, meeting={}, timeout=60.0)
        self.draft, self.kinds, self.waits = draft, [], []

    def connect(self):
        store, made = dist.HashStore(), {}
        joining = threading.Thread(target=lambda: made.update(end=Channel(store, is_target=False)))
        joining.start()
        self.channel = Channel(store, is_target=True)
        joining.join()
        self.other_end = made["end"]
        self.worker_info = {"vocab_size": VOCAB, "device": "cpu"}
        send = self.channel.send
        self.channel.send = lambda message: (self.kinds.append(message.kind), send(message))
        receive = self.other_end.receive

        def received(timeout, awake=AWAKE):
            message = receive(timeout, awake)
            self.waits.append((message, awake))
            return message

        self.other_end.receive = received
        self.thread = threading.Thread(target=DraftServer(self.other_end, self.draft).serve, daemon=True)
        self.thread.start()

    is_alive = property(lambda self: self.channel is not None)

    def stderr_tail(self):
        return ""

    def end(self):
        if self.channel is not None:
            self.channel.send(Message(Kind.STOP))
            self.thread.join(10)
            self.other_end.close()  # gloo waits for what is left, also when it is only collected as garbage

    def stop(self):
        self.kill()


@pytest.fixture
def assistant(monkeypatch):
    monkeypatch.setattr(experience, "planner_for", InAndOut)
    with DraftAssistant([lambda: ThreadWorker(tiny_model())]) as assistant:
        yield assistant


@pytest.mark.parametrize("rows", [1, 3])
def test_a_resting_draft_is_not_asked_and_catches_up(target, assistant, rows):
    inputs = padded_batch(rows)
    plain = target.generate(**inputs, max_new_tokens=70, do_sample=False)
    output = target.generate(
        **inputs, max_new_tokens=70, do_sample=False, assistant_model=assistant, ssd_config=hf_ssd.SSDConfig(),
        return_dict_in_generate=True,
    )  # fmt: skip
    stats = output.ssd_stats
    assert torch.equal(output.sequences, plain) and stats.draft_failure is None
    asked = assistant.workers[0].kinds.count(Kind.OUTCOME)
    assert asked < 0.7 * stats.rounds
    # What went by was learned too, round by round, and what is drafted afterwards is as good as ever.
    seen = list(InAndOut.seen)  # the end of the call may still be on its way
    assert len(seen) >= stats.rounds - RESTING
    # What is observed as round i + 1 is what round i verified: the first lesson is the token after the prompt.
    assert [r.lookahead for r in seen[1:]] == stats.column("lookahead")[: len(seen) - 1]
    assert [r.accepted for r in seen[1:]] == stats.column("accepted")[: len(seen) - 1]
    assert stats.acceptance_rate == 1  # the draft is the target: it knows all tokens that went by


@pytest.mark.parametrize("between", [2, 10**9])  # the second is the mutant: no news
def test_who_asks_at_the_end_of_a_rest_need_not_wait_for_what_went_by(target, assistant, monkeypatch, between):
    """It was told of a few rounds at a time, learned from them, and fed them, while no one waited."""
    monkeypatch.setattr(client, "ROUNDS_BETWEEN_NEWS", between)
    monkeypatch.setattr(messages, "ROUNDS_BETWEEN_NEWS", between)
    feeds, inputs, feed = [], padded_batch(2), Speculator.feed
    monkeypatch.setattr(Speculator, "feed", lambda self: feeds.append(feed(self)))
    output = target.generate(
        **inputs, max_new_tokens=50, do_sample=False, assistant_model=assistant, ssd_config=hf_ssd.SSDConfig(),
        return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(output.sequences, target.generate(**inputs, max_new_tokens=50, do_sample=False))
    assert output.ssd_stats.draft_failure is None and output.ssd_stats.acceptance_rate == 1
    told = [m for m, _ in assistant.workers[0].waits if m.kind in (Kind.OUTCOME, Kind.NEWS)]
    told = [len(payloads.payload_to_outcomes(m.payload, 2)) for m in told]
    at_once = 2 if between == 2 else RESTING - 1
    assert max(told) == at_once  # outcomes in one message
    assert (len(feeds) > 1) == (between == 2)  # the first are the prompts
    seen, stats = list(InAndOut.seen), output.ssd_stats
    assert [r.accepted for r in seen[1:]] == stats.column("accepted")[: len(seen) - 1] and len(
        seen
    ) >= stats.rounds - RESTING


def test_what_went_by_at_the_end_of_a_call_is_learned_too(target, assistant, monkeypatch):
    """Otherwise a rest that is longer than the calls would never end."""

    def calls_until_it_drafts(config):
        for count in range(3 * RESTING):
            output = target.generate(
                **padded_batch(2), max_new_tokens=3, do_sample=False, assistant_model=assistant, ssd_config=config,
                return_dict_in_generate=True,
            )  # fmt: skip
            assert output.ssd_stats.draft_failure is None
            if any(output.ssd_stats.column("lookahead")):
                return count

    assert calls_until_it_drafts(hf_ssd.SSDConfig()) == RESTING // 3
    close = Conversation.close
    monkeypatch.setattr(Conversation, "close", lambda self, outcomes=(): close(self))  # the mutant
    assert calls_until_it_drafts(hf_ssd.SSDConfig(timeout=20.0)) > RESTING // 3  # another planner of the same kind


@pytest.mark.parametrize("at_the_end", [True, False])  # the second is the mutant
def test_what_there_was_no_time_to_learn_is_learned_when_a_call_ends(target, assistant, monkeypatch, at_the_end):
    for name, value in (("phase", RESTING), ("patience", 1000), ("is_repeatable", False)):
        monkeypatch.setattr(InAndOut, name, value)
    monkeypatch.setattr(Channel, "has_arrived", lambda self: True)  # the outcome is always there already
    if not at_the_end:
        monkeypatch.setattr(Speculator, "end", lambda self: None)
    output = target.generate(
        **padded_batch(1), max_new_tokens=30, do_sample=False, assistant_model=assistant, ssd_config=hf_ssd.SSDConfig(),
        return_dict_in_generate=True,
    )  # fmt: skip
    assert output.ssd_stats.draft_failure is None and output.ssd_stats.rounds > 3
    assistant.close()  # whose draft has seen the end of the call by then
    assert (len(InAndOut.seen) >= output.ssd_stats.rounds - 1) == at_the_end


def test_a_call_that_is_all_rest_costs_the_draft_nothing(target, assistant, monkeypatch):
    inputs, passes = padded_batch(3), []
    assistant.workers[0].draft.register_forward_hook(lambda *_: passes.append(1))
    monkeypatch.setattr(InAndOut, "phase", 0)

    def passes_of_a_call(rest):
        passes.clear()
        monkeypatch.setattr(InAndOut, "rest", rest)
        output = target.generate(
            **inputs, max_new_tokens=20, do_sample=False, assistant_model=assistant, ssd_config=hf_ssd.SSDConfig(),
            return_dict_in_generate=True,
        )  # fmt: skip
        assert output.ssd_stats.draft_failure is None
        assert torch.equal(output.sequences, target.generate(**inputs, max_new_tokens=20, do_sample=False))
        return len(passes)

    assert passes_of_a_call(rest=100) == 0
    assert passes_of_a_call(rest=0) == 1  # the prompts: the draft may be asked any time


def test_who_is_not_asked_for_a_while_sleeps(target, assistant):
    """Waiting awake takes some of the power of the cores beside, on which plain decoding goes on."""
    target.generate(
        **padded_batch(1), max_new_tokens=40, do_sample=False, assistant_model=assistant, ssd_config=hf_ssd.SSDConfig()
    )
    waits = assistant.workers[0].waits
    one = min(len(message.payload) for message, _ in waits if message.kind == Kind.OUTCOME)
    for message, awake in waits:
        if message.kind == Kind.OUTCOME:
            assert awake == (0 if len(message.payload) > one else AWAKE)  # outcomes of quiet rounds come together
        elif message.kind == Kind.START:
            assert awake == 0
    assert {awake for message, awake in waits if message.kind == Kind.OUTCOME} == {0, AWAKE}


@pytest.mark.parametrize(
    "rest, seconds, waits",
    [
        (5, WARM_UP + 2.0, [(pytest.approx(2.0), 0.0), (None, WARM_UP + AWAKE)]),
        (5, WARM_UP / 2, [(None, WARM_UP + AWAKE)]),
        (0, 0.0, [(None, AWAKE)]),
        (0, None, [(None, 0.0)]),  # between calls
    ],
)
def test_who_is_asked_soon_after_a_rest_is_awake_by_then(rest, seconds, waits):
    """A core that slept for seconds is slow for a while, and what is tried then would look worse than it is."""
    seen = []

    def receive(timeout, awake=AWAKE):
        seen.append((timeout, awake))
        if timeout is not None:
            raise TimeoutError
        return Message(Kind.STOP)

    server = DraftServer(SimpleNamespace(receive=receive), None)
    server.rest, server.speculator = rest, None if seconds is None else SimpleNamespace(rest_seconds=seconds)
    server.serve()
    assert seen == waits


def test_a_worker_warms_up_for_the_end_of_a_rest(target, assistant, monkeypatch):
    monkeypatch.setattr(InAndOut, "rest_seconds", WARM_UP)  # not long enough to sleep first
    inputs = padded_batch(1)
    output = target.generate(
        **inputs, max_new_tokens=40, do_sample=False, assistant_model=assistant, ssd_config=hf_ssd.SSDConfig()
    )
    assert torch.equal(output, target.generate(**inputs, max_new_tokens=40, do_sample=False))
    asked = {awake for message, awake in assistant.workers[0].waits if message.kind == Kind.OUTCOME}
    assert asked == {WARM_UP + AWAKE, AWAKE}


def test_sampled_calls_go_through_too(target, assistant):
    outputs = []
    for _ in range(2):
        assistant.workers[0].kinds.clear()
        set_seed(3)
        config = hf_ssd.SSDConfig(timeout=20.0 + len(outputs))  # another planner of the same kind
        outputs.append(
            target.generate(**padded_batch(2), max_new_tokens=40, do_sample=True, assistant_model=assistant,
                            ssd_config=config, return_dict_in_generate=True)
        )  # fmt: skip
    assert all(output.ssd_stats.draft_failure is None for output in outputs)
    assert all(
        0 in output.ssd_stats.column("lookahead") and 3 in output.ssd_stats.column("lookahead") for output in outputs
    )


class SlowStreamer(BaseStreamer):
    def put(self, value):
        time.sleep(0.02)

    def end(self):
        pass


def test_a_quiet_round_takes_as_long_as_the_caller_makes_it(target, assistant):
    """Plain decoding hides no bookkeeping behind a wait, so that is part of what a token costs without a draft."""
    target.generate(
        **padded_batch(1), max_new_tokens=30, do_sample=False, assistant_model=assistant, ssd_config=hf_ssd.SSDConfig(),
        streamer=SlowStreamer(),
    )  # fmt: skip
    quiet = [r.seconds for r in InAndOut.seen if not r.lookahead and r.elapsed == r.seconds > 0]
    assert len(quiet) > 3 and statistics.median(quiet) > 0.02  # the first one of a rest was asked for
    asked = [r.seconds for r in InAndOut.seen if r.lookahead]
    assert min(asked) < 0.02  # verification alone
