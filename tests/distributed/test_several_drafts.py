"""Several draft workers that share the outcomes: real processes, and the answers of one."""

import dataclasses
import functools

import psutil
import pytest
import torch
from transformers import GenerationConfig

import hf_ssd
from hf_ssd.distributed import shared_channel
from hf_ssd.distributed.sessions import WorkerSession
from hf_ssd.drafting.request import SessionRequest
from hf_ssd.rounds import AHEAD, CUSTOM, Outcome, Plan

from ..helpers.at_length import AtLength
from ..helpers.calls import call
from ..helpers.loopback import Loopback
from ..helpers.tiny import ready

BUDGET = 6


@pytest.fixture(scope="module")
def one(draft):
    with hf_ssd.launch_draft(draft, num_threads=1) as assistant:
        yield assistant


@pytest.fixture(scope="module")
def shared_two(draft):
    with hf_ssd.launch_draft(draft, devices=["cpu", "cpu"], num_threads=1) as assistant:
        yield assistant


@pytest.fixture
def two(shared_two):
    """With living workers, whatever the test before did to them."""
    return ready(shared_two)


def generate(target, assistant, rows=2, processor=None, budget=BUDGET, **options):
    names = ("fan_out", "fallback", "saguaro_c", "timeout")
    settings = {"budget": budget} | {name: options.pop(name) for name in names if name in options}
    return call(target, assistant, rows, processor, seed=5, settings=settings, **options)


def of_rounds(output, *names):
    return [tuple(getattr(record, name) for name in names) for record in output.ssd_stats.records]


@pytest.mark.parametrize(
    "rows, options",
    [
        (1, {"do_sample": False}),
        (3, {"do_sample": True, "top_k": 20, "fan_out": "geometric", "saguaro_c": 0.5}),
        (3, {"do_sample": False, "fallback": "ngram", "repetition_penalty": 1.2}),
    ],
    ids=str,
)
def test_two_workers_answer_as_one_with_twice_the_budget(target, one, two, rows, options):
    expected = generate(target, one, rows, budget=2 * BUDGET, **options)
    output = generate(target, two, rows, **options)
    assert torch.equal(output.sequences, expected.sequences)
    assert of_rounds(output, "sources", "accepted") == of_rounds(expected, "sources", "accepted")
    assert 0 < output.ssd_stats.hit_rate and {budget for (budget,) in of_rounds(output, "budget")} == {2 * BUDGET}


def test_two_workers_with_the_same_share_would_not(target, one, two, monkeypatch):
    """The mutant for the test above."""
    write, first = shared_channel.write_request, functools.partial(dataclasses.replace, worker_index=0)
    monkeypatch.setattr(shared_channel, "write_request", lambda request: write(first(request)))
    expected = generate(target, one, budget=2 * BUDGET, do_sample=False)
    assert of_rounds(generate(target, two, do_sample=False), "sources") != of_rounds(expected, "sources")


def test_a_worker_completes_less_than_it_has_prepared(draft):
    """As when the plan has become shorter, and another worker or a fallback has something for another row."""
    prompts, generation = [torch.arange(2, 8), torch.arange(3, 7)], GenerationConfig(do_sample=True, max_length=50)
    config, plan = hf_ssd.SSDConfig(lookahead=3, budget=BUDGET), Plan(AHEAD, 3, 3, BUDGET)
    worker = Loopback(draft)
    session = WorkerSession(worker, 1, SessionRequest(config, generation, prompts, 0, 97, plan=plan, num_workers=2))
    session.begin()
    with torch.inference_mode():
        worker.work()
        hit = worker.server.calls[1].speculator.prepared.bonus[0][0]
        session.send_outcome(Outcome([[hit], [hit]]), Plan(AHEAD, 2, 2, BUDGET))
        found = session.receive_speculation()
        q = session.receive_probabilities()
        assert len(found.tokens[0]) == 3 and found.record.hits[0]
        expected = [found.tokens[0][:2], [7, 8]]
        found.tokens = [found.tokens[0][:1], [7, 8]]
        session.send_proposals(found.tokens, ["prepared", CUSTOM], 2)
        completed = session.receive_speculation()
        assert completed.tokens == expected  # the second token of the first row, drafted once more
        torch.testing.assert_close(session.receive_probabilities()[0, 1], q[0, 1], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lost, how, options",
    [
        ([1], "kill", {"do_sample": True, "temperature": 0.3}),
        ([0], "suspend", {"do_sample": False, "timeout": 1.0}),  # the other answer is read after the deadline
        ([0, 1], "kill", {"do_sample": False}),
    ],
    ids=str,
)
def test_when_workers_are_lost_the_call_goes_on_with_the_others(target, two, lost, how, options, warnings):
    processes = [psutil.Process(two.workers[number].process.popen.pid) for number in lost]
    act = AtLength(15, lambda: [getattr(process, how)() for process in processes])
    output = generate(target, two, processor=act, **options)
    stats = output.ssd_stats
    if len(lost) == 2:
        assert "has ended" in stats.draft_failure and len(warnings) == 2
        return
    assert stats.draft_failure is None and stats.records[-6].lookahead == 3
    assert any(any(record.hits) for record in stats.records[-8:]) and not two.workers[lost[0]].is_alive
    reason = "Going on with 1 of the draft workers" if how == "kill" else "did not answer within 1 s"
    assert len(warnings) == 1 and reason in warnings[0]
    warnings.clear()
    assert generate(target, two, do_sample=False).ssd_stats.draft_failure is None
    assert warnings == ["The draft worker had ended; starting another one."]


@pytest.mark.slow
def test_one_that_does_not_start_again_is_left_out(target, two, warnings, monkeypatch):
    attempts = []

    def fails():
        attempts.append(True)
        raise OSError("no such device")

    for worker in two.workers:
        worker.process.popen.kill()
        worker.process.popen.wait()
    with monkeypatch.context() as patched:
        patched.setattr(two.workers[0], "launch", fails)
        for _ in range(3):
            output = generate(target, ready(two), do_sample=False)
            assert output.ssd_stats.draft_failure is None
            assert [output.ssd_stats.hit_rate > 0] + [worker.is_alive for worker in two.workers] == [True, False, True]
        assert len(attempts) == 1  # it is not waited for again, while the other one lives
    for worker in two.workers:
        worker.kill()
    assert generate(target, ready(two), do_sample=False).ssd_stats.hit_rate > 0
    assert all(worker.is_alive for worker in two.workers)
