"""Calls of one draft at the same time: its workers serve all of them, and what ends one leaves the others alone."""

import threading

import pytest
import torch
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

import hf_ssd
from hf_ssd.distributed.sessions import WorkerSession
from hf_ssd.distributed.transport import Channel
from hf_ssd.distributed.wire import Kind
from hf_ssd.rounds import AHEAD, Outcome

from ..helpers.calls import call
from ..helpers.channels import both
from ..helpers.tiny import padded_batch, ready, tiny_draft

PROMPT, SHORT, LONG = 9, 24, 56
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 0}
KINDS = {"greedy": ({}, {}), "sampled": (SAMPLED, {}), "coupled": (SAMPLED, {"verification": "coupled"})}


@pytest.fixture(scope="module")
def other():
    """Another target, of which the draft knows as much."""
    return hf_ssd.enable(tiny_draft(disagreement=0.02))


@pytest.fixture(scope="module")
def two():
    with hf_ssd.launch_draft(tiny_draft(), devices=["cpu", "cpu"], num_threads=1) as assistant:
        yield assistant


@pytest.fixture
def one(assistant):
    """The worker that all tests share, which lives before a test and after it."""
    yield ready(assistant)
    ready(assistant)


class Does(LogitsProcessor):
    """Calls functions, each once, when the output has reached a length."""

    def __init__(self, actions):
        self.actions = dict(sorted(actions.items()))

    def __call__(self, input_ids, scores):
        for length in [length for length in self.actions if input_ids.shape[1] >= length]:
            self.actions.pop(length)()
        return scores


def at_once(first, second, lengths=(12, 15, 20, 26), **actions):
    """
    Runs two functions of a processor in two threads, and returns what they return or raise. The second begins after the
    first has drawn its seed, and the calls wait for each other at some lengths of the output.
    """
    begun, barrier = threading.Event(), threading.Barrier(2)
    meetings = dict.fromkeys(lengths, lambda: barrier.wait(60))

    def later():
        assert begun.wait(60)
        return second(Does({**meetings, **actions.get("of_second", {})}))

    return both(lambda: first(Does({PROMPT: begun.set, **meetings, **actions.get("of_first", {})})), later)


def check_speculates(stats):
    assert stats.draft_failure is None and stats.draft_joined_at == 0, stats.draft_failure
    assert {*stats.column("mode")} == {AHEAD} and stats.hit_rate > 0.1


def check_two_calls(targets, assistant, kind, **more):
    """The second call is the shorter one, and ends before the first does."""
    (options, settings), over = KINDS[kind], threading.Event()
    settings = {**settings, **more}

    def generate(number, processor):
        of_call = {**options, "settings": settings, "max_new_tokens": SHORT if number else LONG, "rows": 1 + 2 * number}
        return call(targets[number], assistant, processor=processor, seed=5 + number, **of_call)

    def short(processor):
        output = generate(1, processor)
        over.set()
        return output

    alone = [generate(number, Does({})).sequences for number in range(2)]
    wait = {PROMPT + LONG - 10: lambda: over.wait(60)}
    outputs = at_once(lambda processor: generate(0, processor), short, of_first=wait)
    for output, expected in zip(outputs, alone):
        assert not isinstance(output, Exception), output
        assert torch.equal(output.sequences, expected)
        check_speculates(output.ssd_stats)
    assert over.is_set() and outputs[0].ssd_stats.rounds > outputs[1].ssd_stats.rounds


CASES = [("greedy", "one"), ("sampled", "two"), ("sampled", "one"), ("coupled", "one")]  # and how many workers


@pytest.mark.slow
@pytest.mark.parametrize("kind, workers", CASES)
def test_two_targets_have_one_draft(target, other, kind, workers, request):
    check_two_calls([target, other], ready(request.getfixturevalue(workers)), kind)


def test_a_message_that_is_given_to_another_call_is_noticed(target, other, one, monkeypatch):
    """The mutant."""
    receive, swapped = Channel.receive, []

    def wrongly(self, timeout):
        message = receive(self, timeout)
        sessions = list(one.workers[0].channel.inboxes)
        if len(sessions) == 2 and message.kind == Kind.SPECULATION and not swapped:
            swapped.append(message.session)
            message.session = sessions[not sessions.index(message.session)]
        return message

    monkeypatch.setattr(Channel, "receive", wrongly)
    with pytest.raises(AssertionError):
        check_two_calls([target, other], one, "greedy", timeout=1.0)
    assert swapped


class At(BaseStreamer):
    """Does something in the thread that decodes, once a request has some tokens."""

    def __init__(self, count, action):
        self.left, self.action = count, action

    def put(self, value):
        self.left -= len(value) if value.dim() == 1 else 0
        if self.left <= 0 and self.action is not None:
            action, self.action = self.action, None
            action()

    def end(self):
        pass


def test_two_running_batches_have_one_draft(target, other, one):
    settings, barrier = {"lookahead": 3, "budget": 8}, threading.Barrier(2)
    prompts = [padded_batch(1, length, seed=length)["input_ids"] for length in (9, 20, 14)]
    options = [{"max_new_tokens": 40}, {"max_new_tokens": 12}, {**SAMPLED, "max_new_tokens": 30}]

    def alone(model, number):
        config = hf_ssd.SSDConfig(**settings, verification="coupled", asynchronous=False)
        torch.manual_seed(number)
        draft = {"assistant_model": one, "ssd_config": config} if number == 2 else {}
        return model.generate(prompts[number], **{"do_sample": False, **options[number]}, **draft)

    def run(model):
        with hf_ssd.continuous_batching(model, one, hf_ssd.SSDConfig(**settings), max_rows=2) as manager:
            ids = []
            for number, prompt in enumerate(prompts):
                streamer = At(10, lambda: barrier.wait(60)) if number != 1 else None
                own = {"do_sample": False, **options[number], "seed": number, "streamer": streamer}
                ids.append(manager.add_request(prompt, **own))
            requests = [manager.requests[one][0] for one in ids]
            for request in requests:
                assert request.has_ended.wait(120)
            return requests

    expected = [[alone(model, number) for number in range(3)] for model in (target, other)]
    for requests, texts in zip(both(lambda: run(target), lambda: run(other)), expected):
        assert not isinstance(requests, Exception), requests
        for request, text in zip(requests, texts):
            assert request.error is None and torch.equal(request.output, text)
            records = request.stats.records
            assert sum(record.mode == AHEAD for record in records) > len(records) / 2
        assert any(any(record.hits) for request in requests for record in request.stats.records)


def test_a_worker_that_is_killed_is_lost_to_all_its_calls_and_started_once(target, other, one, warnings):
    before, process = one.restarts, one.workers[0].process.popen

    def generate(model, processor=None):
        return call(model, one, processor=processor, max_new_tokens=40).ssd_stats

    found = at_once(
        lambda processor: generate(target, processor),
        lambda processor: generate(other, processor),
        of_second={16: process.kill},
    )
    assert ["has ended" in stats.draft_failure for stats in found] == [True, True], found
    assert len(warnings) == 2 and one.restarts == before
    barrier = threading.Barrier(2)

    def again(model):
        barrier.wait(60)
        ready(one)
        return generate(model)

    for stats in both(lambda: again(target), lambda: again(other)):
        check_speculates(stats)
    assert one.restarts == before + 1 and one.workers[0].process.popen is not process


class Stop(Exception):
    pass


def stop():
    raise Stop


@pytest.mark.parametrize("who", ["the target", "the draft"])
def test_a_call_that_raises_leaves_the_other_alone(target, other, one, who, monkeypatch, warnings):
    process, original, wrong = one.workers[0].process.popen, WorkerSession.send_outcome, []

    def nonsense(self, outcome, plan):
        wrong[:] = wrong or [self.number]
        if who == "the draft" and self.number in wrong and self.round == 2:
            outcome = Outcome([[*tokens[:-1], tokens[-1] + 10**6] for tokens in outcome.tokens])
        return original(self, outcome, plan)

    monkeypatch.setattr(WorkerSession, "send_outcome", nonsense)
    failed, output = at_once(
        lambda processor: call(target, one, processor=processor, rows=1),
        lambda processor: call(other, one, processor=processor),
        lengths=(12,),
        of_first={20: stop if who == "the target" else lambda: None},
    )
    if who == "the target":
        assert isinstance(failed, Stop)
    else:
        assert len(warnings) == 1 and "Traceback" in warnings[0] and "IndexError" in failed.ssd_stats.draft_failure
    check_speculates(output.ssd_stats)
    monkeypatch.undo()
    check_speculates(call(target, one).ssd_stats)
    assert one.workers[0].process.popen is process and process.poll() is None


@pytest.mark.slow
def test_a_call_within_a_call_speculates_too(target, other, one):
    within = []
    for model in (target, other):
        nested = Does({15: lambda model=model: within.append(call(model, one).ssd_stats)})
        check_speculates(call(target, one, processor=nested).ssd_stats)
        check_speculates(within.pop())
