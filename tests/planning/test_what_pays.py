"""In the end the plan is the one that pays, whatever the calls before were."""

import dataclasses
import itertools
from collections import Counter

import pytest

from hf_ssd.distributed.several_drafts import SeveralDrafts
from hf_ssd.planning.experience import Durations
from hf_ssd.planning.profile import KNOWN, Profile
from hf_ssd.rounds import AHEAD, IN_TURN, PLAIN, Outcome

from .simulated_draft import SimulatedDraft
from .worlds import FixedPlanner, World

PAYING = {AHEAD: World(0.9), IN_TURN: World(0.8, contention=2.5, right=0.2), PLAIN: World(0.3, step=0.04)}
HISTORIES = {
    "short calls": {"calls_before": (1, 3, 5)},
    "calls broken off": {"calls_before": (2, 4, 6, 8, 10)},
    "profiles that are lost": {"calls_before": (40, 40), "profiles_lost": 2},
    "fillers that are right": {"fillers_are_right": True},
    "several drafts": {"workers": 2},
    "a draft that was very busy": {"calls_before": (40, 200), "busy": 12.0},
    "a draft that was busy": {"calls_before": (40, 200), "busy": 6.0},
}


def modes_in_the_end(draft, temperature=None, rounds=400):
    """Returns the mode of most of the last rounds of a long call."""
    planner, modes = draft.planner(temperature), []
    with_call = draft.world.call(planner, draft)
    for _ in itertools.islice(with_call, 1, 2 * rounds, 2):
        modes.append(planner.plan.mode)
    with_call.close()
    return Counter(modes[-100:])


def mode_in_the_end(world):
    draft = SimulatedDraft(world)
    for number, count in enumerate(world.calls_before):
        draft.slowness = 1.0 if number else world.busy
        call = world.call(draft.planner(), draft)
        list(itertools.islice(call, count))
        call.close()
    draft.slowness = 1.0
    (mode, _), *_ = modes_in_the_end(draft).most_common(1)
    return mode


@pytest.mark.parametrize("pays", PAYING)
def test_worlds_are_as_they_are_told(pays):
    world = PAYING[pays]
    speeds = {mode: max(world.run(FixedPlanner(*plan), rounds=300) for plan in plans) for mode, plans in {
        PLAIN: [(0, 0)], IN_TURN: [(k, 0) for k in (1, 3, 5)], AHEAD: [(k, 24) for k in (1, 4, 7)]}.items()}  # fmt: skip
    print(speeds)
    assert max(speeds, key=speeds.get) == pays


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("pays", PAYING)
def test_the_plan_in_the_end_is_the_one_that_pays(pays, history):
    assert mode_in_the_end(dataclasses.replace(PAYING[pays], **HISTORIES[history])) == pays
