"""The planner: in simulated worlds, where the best fixed plan is known, and what it is told in a call."""

import dataclasses
import functools
import itertools
import math
import operator
import statistics

import pytest
from transformers.utils import logging

from hf_ssd import SSDConfig
from hf_ssd.planning import planner as planner_module
from hf_ssd.planning import prober
from hf_ssd.planning.cost_model import CostModel
from hf_ssd.planning.estimates import HitRates, Line
from hf_ssd.planning.experience import CallKind
from hf_ssd.planning.fixed_plan import FixedPlan
from hf_ssd.planning.planner import EPOCH_ROUNDS, Planner, planner_for
from hf_ssd.planning.prober import PROBE_ROUNDS
from hf_ssd.rounds import AHEAD, IN_TURN, PLAIN, PREPARED, PRIMARY, RoundRecord

from ..helpers.suites import quick_first, slowly
from ..helpers.tiny import tiny_model
from .worlds import WORLDS, World, fixed_planner, new_planner


@functools.cache
def shares_reached(name):
    """From the 33rd round on, and of all rounds."""
    world = WORLDS[name]
    return [speed / world.best for speed in world.speeds(new_planner(world), (33, 0))]


QUICK = ("a quick draft that agrees", "a useless draft")


@pytest.mark.parametrize("name", quick_first(sorted(WORLDS, key=lambda name: name not in QUICK), len(QUICK)))
def test_from_the_33rd_round_on_it_is_near_the_best_fixed_plan(name):
    assert shares_reached(name)[0] > 0.90
    familiar = ("a quick draft that agrees", "a batch", "bonus tokens that are hard to guess")
    if name not in familiar:  # the mutant: a plan that does not look at the world
        assert WORLDS[name].run(fixed_planner(14, 48), rounds=300) < 0.90 * WORLDS[name].best


@pytest.mark.parametrize("worlds", [QUICK, slowly(WORLDS)], ids=["some", "all"])
def test_in_all_worlds_together_it_is_within_five_percent(worlds):
    later, all_rounds = zip(*map(shares_reached, worlds))
    assert statistics.fmean(later) > 0.95 and statistics.fmean(all_rounds) > 0.95
    for name in ("a useless draft", "a draft as slow as the target"):  # which cost next to nothing
        assert shares_reached(name)[1] > 0.96


@pytest.mark.slow
def test_what_no_part_explains_is_learned(monkeypatch):
    world = WORLDS["branches that cost what no one measures"]
    monkeypatch.setattr(
        Line, "__call__", lambda line, units: 0.0 if line.guess == 0.1 else line.fixed + line.slope * units
    )
    assert world.run(new_planner(world), skip=33) < 0.90 * world.best


def modes_followed(world, rounds=50):
    """Returns the mode of the plan after each round."""
    planner, modes = new_planner(world), []
    observe = planner.observe
    planner.observe = lambda *records: (observe(*records), modes.append(planner.plan.mode))
    world.run(planner, rounds=rounds)
    return modes


def test_a_probe_ends_as_soon_as_its_mode_cannot_win(monkeypatch):
    def rounds_probed():
        modes = modes_followed(World(0.3, step=0.03))[2 * EPOCH_ROUNDS :]
        return len(modes) - modes.count(PLAIN)

    assert 1 <= rounds_probed() < PROBE_ROUNDS
    monkeypatch.setattr(prober, "PROBED_GAIN", 100.0)  # the mutant: hopes for ever
    assert rounds_probed() >= PROBE_ROUNDS


def test_a_mode_that_may_win_is_probed_though_another_was_never_used(monkeypatch):
    def rounds_in_turn():
        modes = modes_followed(World(0.9, step=0.0005))
        assert PLAIN not in modes  # which is far too slow
        return modes[2 * EPOCH_ROUNDS :].count(IN_TURN)

    assert rounds_in_turn() == PROBE_ROUNDS
    monkeypatch.setattr(prober, "PROBED_GAIN", 1.0)  # the mutant: never hopes
    assert rounds_in_turn() < PROBE_ROUNDS


# ---------------------------------------------------------------- in a call


def test_numbers_in_the_config_stay_as_they_are():
    fixed = FixedPlan(SSDConfig(lookahead=5, budget=7))
    assert (fixed.plan.mode, fixed.plan.lookahead, fixed.plan.after_miss, fixed.plan.budget) == (AHEAD, 5, 5, 7)
    assert not fixed.expects_draft
    seen = {}
    for setting in ({"lookahead": 3}, {"budget": 5}, {"asynchronous": False}):
        world, plans = World(0.8), []
        planner = new_planner(world, **setting)
        for _ in range(30):
            world.run(planner, rounds=EPOCH_ROUNDS)
            plans.append(planner.plan)
        seen[next(iter(setting))] = plans
    # A call that samples repeats its tokens, so it is never decoded plainly.
    assert all((plan.mode, plan.lookahead, plan.after_miss) == (AHEAD, 3, 3) for plan in seen["lookahead"])
    assert {(plan.mode, plan.budget) for plan in seen["budget"]} <= {(AHEAD, 5), (PLAIN, 0)}
    assert {plan.mode for plan in seen["asynchronous"]} <= {IN_TURN, PLAIN}


def test_plain_rounds_come_first_and_drafting_ahead_when_its_trial_is_paid_for(monkeypatch):
    modes = [mode for mode, _ in itertools.groupby([PLAIN, *modes_followed(World(0.9))])]
    assert modes[:3] == [PLAIN, IN_TURN, AHEAD]
    monkeypatch.setattr(prober, "TRIAL_COST", math.inf)
    assert {*modes_followed(World(0.9))} == {IN_TURN}


def test_the_reason_is_one_sentence_with_the_numbers_of_the_plan():
    for world, settings, words in [
        (World(0.9), {}, ("preparing takes", "ms per verification", "lookahead", "budget")),
        (World(0.6, step=0.04), {}, ("not drafting: expected 0.", "acceptance 0.")),
        (World(0.8), {"asynchronous": False}, ("drafting in turn", "lookahead")),
    ]:
        planner = new_planner(world, **settings)
        world.run(planner, rounds=EPOCH_ROUNDS * 20 + 5)
        planner.experience.prober.start = planner.experience.rounds + 100
        world.run(planner, rounds=2 * EPOCH_ROUNDS)
        assert all(word in planner.reason for word in words), planner.reason
    plain, untried = (PLAIN, 0, 0, 0), (AHEAD, 4, 8, 0)
    assert planner.costs.reason(plain, {plain: 1.0, untried: 1.6}).startswith("not drafting yet: expected 1.60 times")
    assert "settings are fixed" in FixedPlan(SSDConfig(lookahead=4, budget=8)).reason_of([])


def test_a_shared_memory_is_named_once(monkeypatch):
    messages = []
    monkeypatch.setattr(logging.get_logger(planner_module.__name__), "warning_once", messages.append)
    for world, named in ((World(0.8, contention=1.7), True), (World(0.8), False)):
        messages.clear()
        world.run(new_planner(world), rounds=300)
        words = "factor 1.7: target and draft share a device, its cores or its memory bandwidth"
        assert [words in message for message in messages] == [True] * named


def test_a_call_starts_from_what_is_known_of_texts_in_general():
    costs = CostModel(CallKind(SSDConfig(), 1, 1000))
    for _ in range(5):
        costs.begin_call()
        for k in [0] * 120 + [4] * 80:  # texts of which the draft knows the end, and little of the rest
            costs.observe(RoundRecord(), RoundRecord(AHEAD, 4, 8, [PRIMARY], accepted=[k]))
    of_the_end = costs.acceptance(1)[0]
    costs.begin_call()
    assert costs.acceptance(1)[0] == pytest.approx(0.5, abs=0.06)
    assert of_the_end > 0.6  # the mutant: no such beginning


def test_costs_are_for_the_rows_that_are_not_finished():
    costs = CostModel(CallKind(SSDConfig(), 4, 1000))
    for tokens in [*range(4, 40, 4)] * 20:  # a verification that costs by the token
        costs.durations.verification[AHEAD].observe(tokens, 0.05 + 0.01 * tokens)
    of_all = costs.seconds_to_verify(AHEAD, 3)
    records = [RoundRecord(AHEAD, 3, 8, [PREPARED] * 4, accepted=[1, -1, -1, -1]) for _ in range(2)]
    costs.observe(*records)
    assert costs.live == 1 and costs.seconds_to_verify(AHEAD, 3) < of_all - 2 * 4 * 0.01
    costs.begin_call()
    assert costs.live == 4


def learned_from_trees():
    """Returns the expected acceptance, cost of a verification, and share of first guesses that are right."""
    costs = CostModel(CallKind(SSDConfig(tree_nodes=8), 1, 1000))
    tree = RoundRecord(AHEAD, 4, 6, [PRIMARY], nodes=8, turns=[4], accepted=[4], ranks=[0], verify_seconds=0.1)
    for tokens in [3, 5, 9] * 200:
        costs.durations.verification[AHEAD].observe(tokens, 0.01 + 0.01 * tokens)
    for _ in range(200):
        costs.observe(tree, tree)
    return costs.acceptance(4)[3], costs.seconds_to_verify(AHEAD, 4), costs.experience.hit_rates.ranks[True].value[0]


def test_trees_teach_what_their_chains_gain_and_what_their_nodes_cost(monkeypatch):
    expected = (pytest.approx(0, abs=0.1), pytest.approx(0.1, rel=0.05), pytest.approx(1, abs=0.1))
    assert learned_from_trees() == expected
    monkeypatch.setattr(RoundRecord, "of_chain", lambda self, row: self.accepted[row])  # the mutant: siblings count
    assert [*map(operator.ne, learned_from_trees(), expected)] == [True, False, True]


def test_hit_rates_know_the_cache_shape():
    shapes = ("confidence", "geometric", "uniform")
    rates = {shape: HitRates(SSDConfig(fan_out=shape))([0.7] * 5, [4, 16]) for shape in shapes}
    assert all(0 < few < many <= 1 for few, many in rates.values())
    best = rates["confidence"]
    assert all(few <= best[0] and many <= best[1] for few, many in rates.values())
    one_count = HitRates(SSDConfig(fan_out=[16, 0, 0, 0, 0, 0]))
    assert one_count([0.7] * 5, [16])[0] < 0.5 * best[1]
    measured = HitRates(SSDConfig())
    for _ in range(100):
        measured.observe_hits(0.2, [0.7] * 5, 8)
    assert measured([0.7] * 5, [8])[0] == pytest.approx(0.2, abs=0.05)
    assert HitRates(SSDConfig())([0.7] * 5, [8])[0] > 0.3


def test_budgets_fit_the_memory():
    costs = CostModel(CallKind(SSDConfig(), 8, 150_000, temperature=1.0))
    assert costs.largest_budget(4) * 4 * 8 * 150_000 * 4 <= 2**29 and costs.largest_budget(4) >= 1
    assert CostModel(CallKind(SSDConfig(), 8, 150_000)).largest_budget(4) > 1000
    planner = Planner(CallKind(SSDConfig(), 8, 150_000, temperature=1.0))
    assert planner.plan.budget <= planner.costs.largest_budget(planner.plan.lookahead)


def test_what_a_token_more_costs_is_known_although_most_rounds_have_one_size():
    line, like, alone = Line(0.02), Line(0.02), Line(0.02)
    like.like = line
    for units in [1, 5, 9] * 10:
        line.observe(units, 2.0 + 0.4 * units)
        like.observe(4, 3 * (2.0 + 0.4 * 4))
        alone.observe(4, 3 * (2.0 + 0.4 * 4))
    assert line(9) == pytest.approx(5.6, rel=0.02) and like(9) == pytest.approx(3 * line(9), rel=0.05)
    assert alone(9) < 0.8 * 3 * line(9)  # the mutant: like no other


def test_costs_are_kept_by_pair_and_size_and_experience_by_kind_of_call():
    def costs_for(*of_call):
        return planner_for(*of_call).costs

    target, draft = tiny_model(), tiny_model(seed=1)
    kind = CallKind(SSDConfig(), 1, 97, temperature=0.7, length=100)
    first = costs_for(target, draft, kind)
    again = costs_for(target, draft, dataclasses.replace(kind, config=SSDConfig(), length=120))
    assert again is not first and again.durations is first.durations and again.experience is first.experience
    for change in ({"config": SSDConfig(budget=3)}, {"temperature": 0.9}):
        other = costs_for(target, draft, dataclasses.replace(kind, **change))
        assert other.durations is first.durations and other.experience is not first.experience
    costs_for(target, draft, kind)  # the latest one is that from which others begin
    first.durations.rounds, first.experience.rounds = 5, 7
    first.experience.rates.drafted.places[0].restart(0.25, 1000.0)
    longer = costs_for(target, draft, dataclasses.replace(kind, length=10000, temperature=0.2))
    assert (longer.durations.rounds, longer.experience.rounds) == (5, 7)  # begins with what is known, by itself
    assert longer.durations is not first.durations and longer.experience is not first.experience
    place = longer.experience.rates.drafted.places[0]
    assert place.value == pytest.approx(0.25) and place.weight < 100
    for models, change in [((target, draft), {"rows": 2}), ((target, draft), {"length": 1000}), ((draft, draft), {})]:
        other = costs_for(*models, dataclasses.replace(kind, **change))
        assert other.durations is not first.durations and other.experience is not first.experience
