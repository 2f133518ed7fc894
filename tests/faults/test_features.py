"""Features that do not arrive, or are none: the call goes on without the draft, and no token is lost."""

import pytest
import torch

import hf_ssd
from hf_ssd.distributed import draft_server
from hf_ssd.distributed.assistant import DraftAssistant
from hf_ssd.distributed.sessions import WorkerSession
from hf_ssd.distributed.transport import Channel

from ..helpers.calls import call
from ..helpers.heads import tiny_head
from ..helpers.thread_worker import ThreadWorker
from ..helpers.tiny import ready

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def head(target):
    return tiny_head(target)


@pytest.fixture(scope="module")
def assistant(head):
    with hf_ssd.launch_draft(head, num_threads=1) as assistant:
        yield assistant


def generate(target, assistant):
    """Returns why the draft was given up, and the modes of the rounds."""
    stats = call(target, assistant, rows=3, max_new_tokens=16, settings={"budget": 12}).ssd_stats
    return stats.draft_failure, {*stats.column("mode")}


@pytest.fixture
def sends(monkeypatch):
    """Lets sessions send other features, which a function makes of the round and the right ones."""
    original = WorkerSession.send_outcome

    def sends(change):
        def changed(self, outcome, plan):
            outcome.states = change(self.round, outcome.states)
            original(self, outcome, plan)

        monkeypatch.setattr(WorkerSession, "send_outcome", changed)

    return sends


DAMAGE = {
    "too few": (lambda features: features[1:], "are not the 96 features"),
    "too wide": (lambda features: features.repeat(1, 2), "are not the 96 features"),
    "of integers": (lambda features: features.int(), "are not the 96 features"),
    "not a number": (lambda features: features * torch.nan, "finite"),
    "infinite": (lambda features: features.masked_fill(features == features.max(), torch.inf), "finite"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_features_cost_speed_and_no_tokens(target, assistant, name, sends):
    damage, message = DAMAGE[name]
    sends(lambda round_, features: damage(features) if round_ == 1 else features)
    failure, modes = generate(target, ready(assistant))
    assert message in failure and modes == {"ahead", "plain"}
    sends(lambda round_, features: features)
    assert generate(target, ready(assistant)) == (None, {"ahead"})


UNREFUSED = {
    "huge": lambda features: features.sign() * 3e38,  # the head computes NaN from them
    "of other tokens": lambda features: features.roll(1, 0),
    "of another precision": lambda features: features.half(),
}


@pytest.mark.parametrize("name", UNREFUSED)
def test_wrong_features_cost_no_tokens(target, head, name, sends):
    sends(lambda _, features: UNREFUSED[name](features))
    with DraftAssistant([ThreadWorker(head)]) as assistant:
        assert generate(target, assistant) == (None, {"ahead"})


def test_features_that_never_come_are_not_waited_for_for_ever(target, head, sends, monkeypatch):
    monkeypatch.setattr(draft_server, "FEATURES_TIMEOUT", 0.2)
    sends(lambda *_: None)
    with DraftAssistant([ThreadWorker(head)]) as assistant:
        failure, modes = generate(target, assistant)
    assert "no message came in time" in failure and modes == {"plain"}


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
        assert "has ended" in generate(target, ready(assistant))[0] and len(sent) == 3
    assert generate(target, ready(assistant))[0] is None


def test_several_workers_share_the_outcomes_of_a_head(target, head):
    with hf_ssd.launch_draft(head, devices=["cpu", "cpu"]) as assistant:
        assert generate(target, assistant) == (None, {"ahead"})
