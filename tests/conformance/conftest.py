"""A draft that prepares ahead of time in the test's own process, where a mutant reaches it too."""

import contextlib
import dataclasses

import pytest

from hf_ssd.distributed.local import LocalSession
from hf_ssd.drafting.speculator import Speculator
from hf_ssd.rounds import AHEAD, PLAIN


def ahead(plan, config):
    """The plan of drafting in turn, but ahead of time."""
    return dataclasses.replace(plan, mode=AHEAD, budget=8 if config.budget == "auto" else config.budget)


@contextlib.contextmanager
def preparing(planned=ahead, outcome_arrived=lambda: False):
    """
    Prepares ahead of time without a worker, in a moment, and collects the share of rows that hit in each round.

    Args:
        planned (`Callable`): Makes the plan from that of the planner and the settings.
        outcome_arrived (`Callable`): See [`Speculator.prepare`].
    """
    prepare, send, receive, hits = Speculator.prepare, LocalSession.send_outcome, LocalSession.receive_speculation, []

    def sends(self, outcome, plan, *features):
        plan = planned(plan, self.speculator.config)
        if self.speculator.plan.mode == PLAIN:  # the first outcome, for which a worker would have prepared meanwhile
            self.speculator.prepare(plan)
        send(self, outcome, plan, *features)

    def receives(self):
        speculation = receive(self)
        hits.append(sum(speculation.record.hits) / len(speculation.tokens))
        return speculation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalSession, "send_outcome", sends)
        patch.setattr(LocalSession, "receive_speculation", receives)
        patch.setattr(Speculator, "prepare", lambda self, plan, _=None: prepare(self, plan, outcome_arrived))
        yield hits


@pytest.fixture
def prepared_in_process():
    """The same for a whole test."""
    with preparing() as hits:
        yield hits
