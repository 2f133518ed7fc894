"""Features that do not arrive, or are none: the call goes on without the draft, and no token is lost."""

import pytest
import torch

import hf_ssd
from hf_ssd.distributed import draft_server
from hf_ssd.distributed.assistant import DraftAssistant
from hf_ssd.distributed.sessions import WorkerSession
from hf_ssd.distributed.transport import Channel
from hf_ssd.rounds import Outcome

from ..helpers.heads import tiny_head
from ..helpers.thread_worker import ThreadWorker
from ..helpers.tiny import padded_batch, ready

CONFIG = {"lookahead": 3, "budget": 12}


@pytest.fixture(scope="module")
def head(target):
    return tiny_head(target)


@pytest.fixture(scope="module")
def assistant(head):
    with hf_ssd.launch_draft(head, num_threads=1) as assistant:
        yield assistant


def generate(target, assistant):
    options = {**padded_batch(3), "max_new_tokens": 16, "do_sample": False}
    plain = target.generate(**options)
    config = hf_ssd.SSDConfig(**CONFIG)
    ours = {"assistant_model": assistant, "ssd_config": config, "return_dict_in_generate": True}
    output = target.generate(**options, **ours)
    assert torch.equal(output.sequences, plain)
    return output.ssd_stats


DAMAGE = {
    "too few": (lambda features: features[1:], "are not the 96 features"),
    "too wide": (lambda features: features.repeat(1, 2), "are not the 96 features"),
    "of integers": (lambda features: features.long(), "are not the 96 features"),
    "not a number": (lambda features: features * torch.nan, "finite"),
    "infinite": (lambda features: features.masked_fill(features == features.max(), torch.inf), "finite"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_features_cost_speed_and_no_tokens(target, assistant, name, monkeypatch):
    damage, message = DAMAGE[name]
    original = WorkerSession.send_outcome

    def damaged(self, outcome, plan):
        outcome.states = damage(outcome.states) if self.round == 1 else outcome.states
        original(self, outcome, plan)

    with monkeypatch.context() as patch:
        patch.setattr(WorkerSession, "send_outcome", damaged)
        stats = generate(target, ready(assistant))
    assert message in stats.draft_failure and {record.mode for record in stats.records} == {"ahead", "plain"}
    stats = generate(target, ready(assistant))
    assert stats.draft_failure is None and {record.mode for record in stats.records} == {"ahead"}


UNREFUSED = {
    "huge": lambda features: features.sign() * 3e38,  # the head computes NaN from them
    "of other tokens": lambda features: features.roll(1, 0),
    "of another precision": lambda features: features.half(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNREFUSED)
def test_wrong_features_cost_no_tokens(target, head, name, monkeypatch):
    original = WorkerSession.send_outcome

    def wrong(self, outcome, plan):
        outcome.states = UNREFUSED[name](outcome.states)
        original(self, outcome, plan)

    monkeypatch.setattr(WorkerSession, "send_outcome", wrong)
    with DraftAssistant([ThreadWorker(head)]) as assistant:
        stats = generate(target, assistant)
    assert stats.draft_failure is None and {record.mode for record in stats.records} == {"ahead"}


@pytest.mark.slow
def test_features_that_never_come_are_not_waited_for_for_ever(target, head, monkeypatch):
    original = WorkerSession.send_outcome
    monkeypatch.setattr(draft_server, "FEATURES_TIMEOUT", 0.2)
    monkeypatch.setattr(
        WorkerSession, "send_outcome", lambda self, outcome, plan: original(self, Outcome(outcome.tokens), plan)
    )
    with DraftAssistant([ThreadWorker(head)]) as assistant:
        stats = generate(target, assistant)
    assert "no message came in time" in stats.draft_failure
    assert {record.mode for record in stats.records} == {"plain"}


@pytest.mark.slow
def test_a_worker_killed_between_the_outcome_and_the_features_costs_no_tokens(target, assistant, monkeypatch):
    original, sent = Channel.send_announced, []

    def killing(self, payload):
        sent.append(len(payload))
        if len(sent) == 3:
            assistant.workers[0].process.popen.kill()
            assistant.workers[0].process.popen.wait()
        original(self, payload)

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "send_announced", killing)
        stats = generate(target, ready(assistant))
    assert "has ended" in stats.draft_failure and len(sent) == 3
    assert generate(target, ready(assistant)).draft_failure is None


@pytest.mark.slow
def test_several_workers_share_the_outcomes_of_a_head(target, head):
    with hf_ssd.launch_draft(head, devices=["cpu", "cpu"]) as assistant:
        stats = generate(target, assistant)
        assert stats.draft_failure is None and {record.mode for record in stats.records} == {"ahead"}
