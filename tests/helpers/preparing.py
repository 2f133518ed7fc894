"""A draft that prepares ahead of time in the test's own process, where a mutant reaches it too."""

import contextlib
import dataclasses
import random

import pytest

from hf_ssd.generation import draft
from hf_ssd.generation.local_session import LocalSession
from hf_ssd.generation.proposers.proposers import Proposers
from hf_ssd.rounds import AHEAD, Plan


def ahead(plan, config):
    """The plan of drafting in turn, but ahead of time."""
    return dataclasses.replace(plan, mode=AHEAD, budget=8 if config.budget == "auto" else config.budget)


def prepare_until(speculator, plan, outcome_arrived):
    """Prepares, and asks between two passes whether the outcome has arrived, as a worker does."""
    passes = speculator.passes(plan)
    for _ in passes:
        if outcome_arrived():
            speculator.stop(passes)


class Whims:
    """Plans by chance, as if by the clock: how far and widely to draft, from where, and when an outcome arrives."""

    def __init__(self):
        self.random = random.Random(4)

    def planned(self, *_):
        fallback, lookahead = self.random.choice(["primary", "ngram", "random"]), self.random.randrange(5)
        after_miss, budget = self.random.randint(0, lookahead), self.random.randrange(9)
        return Plan(AHEAD, lookahead, after_miss, budget, fallback, early=self.random.choice([0, 7]))

    def outcome_arrived(self):
        return self.random.random() < 0.2


@contextlib.contextmanager
def preparing(planned=ahead, outcome_arrived=lambda: False):
    """
    Prepares ahead of time in this process, where calls draft in turn otherwise, and collects the share of rows that hit
    in each round. `planned` makes the plan from that of the planner and the settings; see [`prepare_until`] too.
    """
    hits, plans, take_in = [], {}, Proposers.take_in

    def local_session(model, request):
        session = LocalSession(model, dataclasses.replace(request, plan=planned(request.plan, request.config)))
        session.speculator.prepare = lambda plan: prepare_until(session.speculator, plan, outcome_arrived)
        send, receive = session.send_outcome, session.receive_speculation

        def receives():
            speculation = receive()
            hits.append(sum(speculation.record.hits) / len(speculation.tokens))
            return speculation

        session.send_outcome = lambda outcome, plan, *told: send(outcome, plans["now"], *told)
        session.receive_speculation = receives
        return session

    def takes_in(self, new, plan, is_beside):
        plans["now"] = plan = planned(plan, self.request.config) if is_beside else plan
        return take_in(self, new, plan, is_beside)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Proposers, "take_in", takes_in)
        patch.setattr(draft, "LocalSession", local_session)
        yield hits
