"""
What tokens were drawn from, over a connection of its own. Between GPUs that is NCCL's (tests/gpu); here gloo stands in
for it, and all else is the same.
"""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import LogitsProcessorList, set_seed

import hf_ssd
from hf_ssd.distributed.device_link import LINK_CTAS, DeviceLink, nccl_group, open_link
from hf_ssd.distributed.passed_drafts import assistant_for
from hf_ssd.distributed.transport import TARGET, Channel, gloo_group
from hf_ssd.distributed.wire import Kind, Message, ProtocolError
from hf_ssd.distributed.worker_process import WorkerProcess

from ..helpers.at_length import AtLength
from ..helpers.tiny import padded_batch, ready, tiny_draft

CPU = torch.device("cpu")
CONFIG = {"lookahead": 3, "budget": 8}


def at_once(*steps):
    """Runs each in a thread, and returns what they return."""
    results = [None] * len(steps)
    threads = [threading.Thread(target=lambda i=i: results.__setitem__(i, steps[i]())) for i in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture
def ends():
    store = dist.HashStore()
    target, draft = at_once(lambda: Channel(store, is_target=True), lambda: Channel(store, is_target=False))
    yield target, draft
    for end in (target, draft):
        end.close()


def test_both_ways_of_a_payload_keep_the_order_of_messages(ends):
    target, draft = ends
    assert at_once(lambda: open_link(target, CPU), lambda: open_link(draft, CPU)) == [True, True]
    for i in range(5):
        draft.send(Message(Kind.SPECULATION, 1, i, torch.arange(200)))
        draft.send(Message(Kind.PROBABILITIES, 1, i, torch.full((3000,), float(i)), over_link=True))
        draft.send(Message(Kind.PROBABILITIES, 1, i, torch.full((2000,), -float(i))))
    for i in range(5):
        speculation, linked, direct = (target.receive(10) for _ in range(3))
        assert (speculation.round, linked.over_link, direct.over_link) == (i, True, False)
        assert torch.equal(linked.payload, torch.full((3000,), float(i)))
        assert torch.equal(direct.payload, torch.full((2000,), -float(i)))


def test_a_wait_for_a_payload_can_be_taken_up_again(ends):
    target, draft = ends
    at_once(lambda: open_link(target, CPU), lambda: open_link(draft, CPU))
    send, held = draft.link.send, []
    draft.link.send = lambda payload: held.append(payload) or _Done()  # the frame goes ahead alone
    draft.send(Message(Kind.PROBABILITIES, payload=torch.ones(500), over_link=True))
    for _ in range(2):
        with pytest.raises(TimeoutError):
            target.receive(0.1)
    work = send(held[0])
    assert torch.equal(target.receive(10).payload, torch.ones(500))
    DeviceLink.wait(work, None)


def test_a_payload_over_a_link_that_is_not_open_is_refused(ends):
    target, draft = ends
    draft.link = type("Link", (), {"send": lambda self, payload: _Done(), "abort": lambda self: None})()
    draft.send(Message(Kind.PROBABILITIES, payload=torch.ones(500), over_link=True))
    with pytest.raises(ProtocolError, match="a link that was not opened"):
        target.receive(10)


def test_what_is_announced_over_a_link_is_received_before_anyone_waits_for_it(ends):
    target, draft = ends
    at_once(lambda: open_link(target, CPU), lambda: open_link(draft, CPU))
    q, received, receive = torch.rand(3000), [], target.link.receive
    target.link.receive = lambda message: received.append(message.kind) or receive(message)
    announced = Message(Kind.PROBABILITIES, payload=q.to("meta"), over_link=True)
    draft.send(Message(Kind.SPECULATION, 1, 2, torch.arange(9), announces=announced))
    assert target.receive(10).kind == Kind.SPECULATION and not received
    target.expect()  # before the forward pass is launched
    assert received == [Kind.PROBABILITIES]
    draft.send_announced(q)
    message = target.receive(10)
    assert (message.session, message.round) == (1, 2) and torch.equal(message.payload, q)


class CountsAborts:
    """A gloo group that stands in for NCCL's, where an abort is what ends the kernels that wait."""

    def __init__(self, *arguments):
        self.group, self.aborts = gloo_group(*arguments), 0

    def abort(self):
        self.aborts += 1

    def broadcast(self, tensors, options):
        return self.group.broadcast(tensors, options)


@pytest.fixture
def made(monkeypatch):
    """The groups that links were made of."""
    made = []
    make = lambda *arguments: made.append(CountsAborts(*arguments)) or made[-1]  # noqa: E731
    monkeypatch.setattr("hf_ssd.distributed.device_link.gloo_group", make)
    return made


def open_without_success(monkeypatch, ends):
    """The trial fails on one side, and takes too long on the other."""
    target, draft = ends
    monkeypatch.setattr("hf_ssd.distributed.device_link.LINK_TIMEOUT", 1.0)
    monkeypatch.setattr(DeviceLink, "_try", lambda link: _fails() if link.rank == TARGET else time.sleep(2))
    assert at_once(lambda: open_link(target, CPU), lambda: open_link(draft, CPU)) == [False, False]


def test_a_link_whose_trial_fails_or_takes_too_long_is_aborted_on_both_sides(ends, made, monkeypatch):
    open_without_success(monkeypatch, ends)
    assert [group.aborts for group in made] == [1, 1]


def test_the_mutant_no_abort_is_noticed(ends, made, monkeypatch):
    monkeypatch.setattr(DeviceLink, "abort", lambda link: None)
    open_without_success(monkeypatch, ends)
    assert [group.aborts for group in made] == [0, 0]


def test_a_link_that_is_closed_is_aborted(ends, made):
    target, draft = ends
    at_once(lambda: open_link(target, CPU), lambda: open_link(draft, CPU))
    target.close_link()
    draft.close()
    assert [group.aborts for group in made] == [1, 1]


def test_a_link_between_gpus_is_made_so_that_its_peer_s_death_ends_no_process(monkeypatch):
    seen = {}

    class StandIn:
        class Options:
            def __init__(self):
                self.config = SimpleNamespace(max_ctas=32)

        def __new__(cls, store, rank, size, options):
            seen.update(errors=os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"], ctas=options.config.max_ctas)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", StandIn, raising=False)
    for before in ("3", None):
        if before is None:
            monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
        else:
            monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", before)
        nccl_group(dist.HashStore(), "link", TARGET)
        assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == before
        assert seen == {"errors": "0", "ctas": LINK_CTAS}
        seen.clear()


class _Done:
    def is_completed(self):
        return True


# ---------------------------------------------------------------- real workers


@pytest.fixture
def linked():
    with hf_ssd.launch_draft(tiny_draft(), num_threads=1) as assistant:
        assert assistant.workers[0].open_link(CPU)
        yield assistant


def sampled(target, assistant, processor=None, **config):
    set_seed(5)
    return target.generate(
        **padded_batch(3),
        do_sample=True,
        temperature=0.8,
        max_new_tokens=30,
        logits_processor=LogitsProcessorList([processor] if processor else []),
        assistant_model=assistant,
        ssd_config=hf_ssd.SSDConfig(**CONFIG, **config),
        return_dict_in_generate=True,
    )


def test_sampled_output_is_that_of_the_oracle_and_nothing_stays_on_its_way(target, linked):
    oracle = sampled(target, tiny_draft(), asynchronous=False)
    link, received = linked.workers[0].channel.link, []
    receive = link.receive
    link.receive = lambda message: received.append(message.payload.numel()) or receive(message)
    pid = linked.workers[0].worker_info["pid"]
    for _ in range(3):
        output = sampled(target, linked)
        assert torch.equal(output.sequences, oracle.sequences) and output.ssd_stats.draft_failure is None
        # One for each speculation, and the one that nobody needed any more.
        assert len(received) == output.ssd_stats.rounds + 1
        received.clear()
    assert linked.workers[0].worker_info["pid"] == pid


def test_the_mutant_other_probabilities_is_noticed(target, linked, monkeypatch):
    oracle = sampled(target, tiny_draft(), asynchronous=False)
    channel = linked.workers[0].channel
    receive = channel.receive

    def receive_others(timeout):
        message = receive(timeout)
        if message.over_link:
            message.payload = message.payload.flip(0)
        return message

    monkeypatch.setattr(channel, "receive", receive_others)
    assert not torch.equal(sampled(target, linked).sequences, oracle.sequences)


def test_a_link_that_fails_costs_no_tokens(target, linked, monkeypatch):
    monkeypatch.setattr(linked.workers[0].channel.link, "wait", _fails)
    output = sampled(target, linked)
    assert "ended" in output.ssd_stats.draft_failure and output.sequences.shape[1] == 9 + 30
    assert sampled(target, linked).ssd_stats.draft_failure is None  # another worker, without a link


def test_a_worker_that_is_killed_takes_nothing_with_it(target, linked):
    pid = linked.workers[0].worker_info["pid"]
    output = sampled(target, linked, AtLength(18, lambda: os.kill(pid, signal.SIGKILL)), timeout=5.0)
    assert output.ssd_stats.draft_failure and output.sequences.shape[1] == 9 + 30
    oracle = sampled(target, tiny_draft(), asynchronous=False)
    assert torch.equal(sampled(target, linked).sequences, oracle.sequences)  # another worker, without a link
    assert linked.workers[0].channel.link is None


def test_a_link_that_one_side_does_not_open_is_given_up(ends, monkeypatch):
    monkeypatch.setattr("hf_ssd.distributed.device_link.LINK_TIMEOUT", 0.5)
    target, _ = ends
    assert not open_link(target, CPU) and target.link is None


def test_a_worker_goes_on_without_the_link_that_its_target_cannot_open(target, monkeypatch):
    with hf_ssd.launch_draft(tiny_draft(), num_threads=1) as assistant:
        worker = assistant.workers[0]
        with monkeypatch.context() as patched:
            patched.setattr(DeviceLink, "_try", _fails)
            assert not worker.open_link(CPU)
        assert worker.channel.link is None
        oracle = sampled(target, tiny_draft(), asynchronous=False)
        assert torch.equal(sampled(target, assistant).sequences, oracle.sequences)


@pytest.fixture
def two_gpus(monkeypatch):
    """The CPU counts as two GPUs, which links connect. Returns how often a link was opened."""
    opened, open_link = [], WorkerProcess.open_link

    def link_gpus(worker, device):
        if not worker.link_was_tried:
            opened.append(device)
            open_link(worker, device)

    monkeypatch.setattr(WorkerProcess, "link_gpus", link_gpus)
    return opened


@pytest.mark.parametrize("how", ["launched for a target", "started by a call", "launched for any target"])
def test_a_link_opens_while_the_worker_starts_if_the_target_is_known(target, two_gpus, how):
    draft = tiny_draft()
    if how == "started by a call":
        target.generate(**padded_batch(1), max_new_tokens=2, assistant_model=draft, ssd_config=hf_ssd.SSDConfig())
        assistant = ready(assistant_for(draft))
    else:
        given = {"target": target} if how == "launched for a target" else {}
        assistant = hf_ssd.launch_draft(draft, num_threads=1, **given)
    with assistant:
        assert len(two_gpus) == (how != "launched for any target")
        assert (assistant.workers[0].channel.link is not None) == bool(two_gpus)
        oracle = sampled(target, tiny_draft(), asynchronous=False)
        output = sampled(target, assistant)
        assert torch.equal(output.sequences, oracle.sequences) and output.ssd_stats.hit_rate > 0
        assert two_gpus == [CPU] and assistant.workers[0].channel.link is not None


class Broken:
    """The user's own fallback."""

    def propose(self, input_ids, lookahead):
        raise ZeroDivisionError


def test_a_fallback_that_raises_ends_the_call_at_once_and_the_worker_stays(target, linked):
    pid, start = linked.workers[0].worker_info["pid"], time.monotonic()
    with pytest.raises(ZeroDivisionError):
        sampled(target, linked, fallback=Broken())
    assert time.monotonic() - start < 10  # and not 30, the timeout
    oracle = sampled(target, tiny_draft(), asynchronous=False)
    assert torch.equal(sampled(target, linked).sequences, oracle.sequences)
    assert linked.workers[0].worker_info["pid"] == pid and linked.workers[0].channel.link is not None


def _fails(*_):
    raise RuntimeError("no peer")


def test_on_one_cpu_there_is_no_link(target, assistant):
    sampled(target, assistant)
    assert assistant.workers[0].channel.link is None and not assistant.workers[0].link_was_tried
