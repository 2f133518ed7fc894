"""Real workers that are killed, stopped or made to raise. A failed draft costs speed, not tokens."""

import os
import signal
import threading
import time

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.utils import logging

import hf_ssd

from ..conftest import padded_batch, tiny_draft

CONFIG = {"lookahead": 3, "budget": 8}


class AtLength(LogitsProcessor):
    """Does something when the output has reached a length, in the middle of a call."""

    def __init__(self, length, action):
        self.length, self.action = length, action

    def __call__(self, input_ids, scores):
        if self.action is not None and input_ids.shape[1] >= self.length:
            action, self.action = self.action, None
            action()
        return scores


@pytest.fixture(scope="module")
def shared_assistant():
    with hf_ssd.launch_draft(tiny_draft(), num_threads=1) as assistant:
        yield assistant


@pytest.fixture
def assistant(shared_assistant, target):
    """With a living worker, whatever the test before did to it."""
    if not shared_assistant.workers[0].is_alive:
        generate(target, shared_assistant, length=2)
    return shared_assistant


@pytest.fixture
def warnings(monkeypatch):
    said = []
    for module in ("hf_ssd.generation.drafting", "hf_ssd.distributed.assistant"):
        monkeypatch.setattr(logging.get_logger(module), "warning", lambda text, *a: said.append(text))
    return said


def generate(target, assistant, length=30, processor=None, rows=2, **config):
    output = target.generate(
        **padded_batch(rows),
        max_new_tokens=length,
        do_sample=False,
        logits_processor=LogitsProcessorList([processor] if processor else []),
        assistant_model=assistant,
        ssd_config=hf_ssd.SSDConfig(**CONFIG, **config),
        return_dict_in_generate=True,
    )
    plain = target.generate(**padded_batch(rows), max_new_tokens=length, do_sample=False)
    assert torch.equal(output.sequences, plain)
    return output.ssd_stats


@pytest.mark.parametrize("length", [9, 20], ids=["before the first round", "in the middle"])
def test_a_killed_worker_costs_no_tokens_and_the_next_call_has_a_new_one(target, assistant, length, warnings):
    first = assistant.workers[0].process.popen.pid
    stats = generate(target, assistant, processor=AtLength(length, assistant.workers[0].process.popen.kill))
    assert "has ended" in stats.draft_failure and len(warnings) == 1 and "plain decoding" in warnings[0]
    stats = generate(target, assistant)
    assert stats.draft_failure is None and stats.hit_rate > 0 and assistant.workers[0].process.popen.pid != first


def test_a_worker_killed_between_calls_is_replaced(target, assistant, warnings):
    assistant.workers[0].process.popen.kill()
    assistant.workers[0].process.popen.wait()
    assert generate(target, assistant).draft_failure is None
    assert warnings == ["The draft worker had ended; starting another one."]


def test_a_stopped_worker_is_given_up_after_the_timeout(target, assistant, warnings):
    pid = assistant.workers[0].process.popen.pid
    start = time.monotonic()
    stats = generate(target, assistant, processor=AtLength(15, lambda: os.kill(pid, signal.SIGSTOP)), timeout=1.0)
    assert "did not answer within 1 s" in stats.draft_failure and len(warnings) == 1
    assert 1 <= time.monotonic() - start < 20
    assert assistant.workers[0].process.popen.poll() is not None  # it is not left behind, stopped


def test_on_draft_failure_raise(target, assistant):
    with pytest.raises(hf_ssd.DraftError, match="has ended"):
        generate(
            target, assistant, processor=AtLength(15, assistant.workers[0].process.popen.kill), on_draft_failure="raise"
        )
    assert generate(target, assistant).draft_failure is None


def test_a_worker_that_raises_shows_its_traceback_and_stays(target, assistant, warnings):
    pid = assistant.workers[0].process.popen.pid
    config = hf_ssd.SSDConfig(**CONFIG)
    prompt = {"input_ids": torch.tensor([[96, 3]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)}
    original = hf_ssd.distributed.client.WorkerSession.send_outcome

    def nonsense(self, accepted, bonus, *figures):
        return original(self, accepted, bonus + (10**6 if self.conversation.round == 2 else 0), *figures)

    hf_ssd.distributed.client.WorkerSession.send_outcome = nonsense
    try:
        output = target.generate(**prompt, max_new_tokens=20, do_sample=False, assistant_model=assistant,
                                 ssd_config=config, return_dict_in_generate=True)  # fmt: skip
    finally:
        hf_ssd.distributed.client.WorkerSession.send_outcome = original
    assert torch.equal(output.sequences, target.generate(**prompt, max_new_tokens=20, do_sample=False))
    assert "Traceback" in output.ssd_stats.draft_failure and "IndexError" in output.ssd_stats.draft_failure
    assert len(warnings) == 1
    assert generate(target, assistant).draft_failure is None and assistant.workers[0].process.popen.pid == pid


def test_late_answers_to_an_old_call_are_dropped(target, assistant):
    """A call that is broken off between rounds leaves an answer on its way."""

    class Stop(Exception):
        pass

    def stop():
        raise Stop

    for length in (9, 10, 15):
        with pytest.raises(Stop):
            generate(target, assistant, processor=AtLength(length, stop))
        assert generate(target, assistant).draft_failure is None


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
        generate(target, assistant, length=230, processor=AtLength(12, interrupt), rows=1, timeout=60.0)
    assert time.monotonic() - start < 10
    assert generate(target, assistant).draft_failure is None


def test_calls_from_several_threads_take_turns(target, assistant):
    expected = [target.generate(**padded_batch(2, seed=s), max_new_tokens=20, do_sample=False) for s in range(4)]
    results = [None] * 4

    def call(i):
        results[i] = target.generate(**padded_batch(2, seed=i), max_new_tokens=20, do_sample=False,
                                     assistant_model=assistant, ssd_config=hf_ssd.SSDConfig(**CONFIG))  # fmt: skip

    threads = [threading.Thread(target=call, args=[i]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(a, b) for a, b in zip(results, expected))
