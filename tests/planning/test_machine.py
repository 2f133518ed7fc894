"""Whatever the calls with a pair were, in whatever threads, the plan in the end is the one that pays."""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from hf_ssd.rounds import AHEAD

from .simulated_draft import SimulatedDraft
from .test_what_pays import PAYING, ahead_is_never_tried, mode_of_a_long_call, plain_rounds_are_not_told


class Calls(RuleBasedStateMachine):
    """Calls of up to two threads with one pair. They begin, go on and end in any order, and take turns at any point."""

    worlds = tuple(PAYING)

    @initialize(data=st.data())
    def begin(self, data):
        self.pays = data.draw(st.sampled_from(self.worlds))
        self.draft, self.calls = SimulatedDraft(PAYING[self.pays]), {}

    @rule(thread=st.booleans(), temperature=st.sampled_from([None, 1.0]))
    def call(self, thread, temperature):
        self.end(thread)
        self.calls[thread] = self.draft.world.call(self.draft.planner(temperature), self.draft)

    @rule(thread=st.booleans(), half_rounds=st.integers(1, 16) | st.just(80))
    def go_on(self, thread, half_rounds):
        """An odd number of half rounds ends as calls do, an even one between a speculation and its outcome."""
        for _ in range(half_rounds if thread in self.calls else 0):
            next(self.calls[thread])

    @rule(thread=st.booleans())
    def end(self, thread):
        if thread in self.calls:
            self.calls.pop(thread).close()

    def teardown(self):
        for thread in (True, False):
            self.end(thread)
        for temperature in (None, 1.0):
            assert mode_of_a_long_call(self.draft, temperature) == self.pays


def try_many(examples, steps, machine=Calls):
    phases = [phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, derandomize=True, database=None,
            phases=phases, suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


def test_the_plan_in_the_end_is_the_one_that_pays():
    try_many(6, 12)


@pytest.mark.slow
def test_the_plan_in_the_end_is_the_one_that_pays_after_many_calls():
    try_many(60, 30)


@pytest.mark.slow
@pytest.mark.parametrize("mutate", [ahead_is_never_tried, plain_rounds_are_not_told])
def test_mutants_are_found(monkeypatch, mutate):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        try_many(60, 30, type("Ahead", (Calls,), {"worlds": (AHEAD,)}))
