"""In the end the plan is the one that pays, whatever the calls before were."""

import contextlib
import dataclasses
import itertools
import math
import statistics

import pytest

from hf_ssd.generation.proposers.proposers import Proposers
from hf_ssd.planning import cost_model, experience, planner, prober
from hf_ssd.planning.cost_model import CostModel
from hf_ssd.planning.experience import Durations, Rates
from hf_ssd.planning.planner import Planner
from hf_ssd.planning.prober import PROBE_SHARE, Prober
from hf_ssd.rounds import AHEAD, IN_TURN, PLAIN

from ..helpers.suites import quick_first
from .cpus import Cpu
from .simulated_draft import SimulatedDraft
from .worlds import World, fixed_planner, new_planner

PAYING = {AHEAD: World(0.9), IN_TURN: World(0.8, contention=2.5, right=0.2), PLAIN: World(0.3, step=0.04)}
HISTORIES = {
    "short calls": {"calls_before": (1, 3, 5)},
    "calls broken off": {"calls_before": (2, 4, 6, 8, 10)},
    "a call that ended before a round in turn": {"calls_before": (10,), "busy": 2.0},
    "several drafts": {"workers": 2},
    "a draft that was very busy": {"calls_before": (40, 200), "busy": 12.0},
    "a draft that was busy": {"calls_before": (10, 200), "busy": 8.0},
}


def modes_of_a_call(draft, half_rounds, planner=None):
    planner = planner or draft.planner()
    with contextlib.closing(draft.world.call(planner, draft)) as call:
        return [planner.plan.mode for _ in itertools.islice(call, half_rounds)]


def mode_of_a_long_call(draft, temperature=None, rounds=400):
    """Returns the mode of most rounds in the second half of a call."""
    modes = modes_of_a_call(draft, 2 * rounds, draft.planner(temperature))
    return statistics.mode(modes[rounds:])


def mode_in_the_end(world):
    """Returns the mode that a long call follows after the calls that the world has before it."""
    draft = SimulatedDraft(world)
    for number, half_rounds in enumerate(world.calls_before):
        draft.slowness = 1.0 if number else world.busy
        modes_of_a_call(draft, half_rounds)
    draft.slowness = 1.0
    return mode_of_a_long_call(draft)


@pytest.mark.parametrize("pays", PAYING)
def test_one_mode_pays_in_each_world(pays):
    plans = {PLAIN: [(0, 0)], IN_TURN: [(1, 0), (3, 0), (5, 0)], AHEAD: [(1, 24), (4, 24), (7, 24)]}
    speeds = {mode: max(PAYING[pays].run(fixed_planner(*one), rounds=200) for one in plans[mode]) for mode in plans}
    assert speeds.pop(pays) > 1.2 * max(speeds.values())


QUICK_HISTORIES = [*zip(itertools.cycle(PAYING), HISTORIES)]  # each once
OTHERS = [case for case in itertools.product(PAYING, HISTORIES) if case not in QUICK_HISTORIES]


@pytest.mark.parametrize("pays, history", quick_first(QUICK_HISTORIES + OTHERS, len(QUICK_HISTORIES)))
def test_the_plan_in_the_end_is_the_one_that_pays(pays, history):
    assert mode_in_the_end(dataclasses.replace(PAYING[pays], **HISTORIES[history])) == pays


@pytest.mark.parametrize("pays", PAYING)
def test_calls_of_several_threads_that_take_turns_leave_the_plan_that_pays(pays):
    draft = SimulatedDraft(PAYING[pays])
    calls = [draft.world.call(draft.planner(temperature), draft) for temperature in (None, 1.0, None)]
    for half_rounds in (3, 8, 1, 80, 16):  # an odd number ends as calls do, an even one is broken off
        for call in calls:
            [next(call) for _ in range(half_rounds)]
        calls.pop().close()
        calls.insert(0, draft.world.call(draft.planner(), draft))
    [call.close() for call in calls]
    assert [mode_of_a_long_call(draft, temperature) for temperature in (None, 1.0)] == [pays] * 2


def rounds_between_probes(world):
    """Returns how many rounds lie between two probes of drafting in a call that decodes plainly."""
    modes = modes_of_a_call(SimulatedDraft(world), 4000)[::2]
    _, first, second, *_ = [i for i, (one, next) in enumerate(itertools.pairwise(modes)) if one == PLAIN != next]
    return second - first


def test_probes_of_a_draft_that_has_much_to_read_are_rarer(monkeypatch):
    world = World(0.3, step=0.03, reading=1.0)
    assert rounds_between_probes(world) * world.verification * PROBE_SHARE > world.reading
    monkeypatch.setattr(prober, "PROBE_SHARE", math.inf)  # the mutant
    assert rounds_between_probes(world) * world.verification * PROBE_SHARE < world.reading


# ---------------------------------------------------------------- the first calls, and the cores of one machine

STEP = 0.36  # seconds of a plain step; a draft with all cores takes a third of it


def on_one_cpu(acceptance, per_token, **fields):
    """A pair of which each side has half of the cores while both work, and all cores while the other waits."""
    alone = fields.setdefault("alone", 1.6)
    fields = {"contention": 1.4, "per_branch": per_token / 3, **fields}
    return World(acceptance, verification=STEP, per_token=per_token, step=alone * STEP / 3, **fields)


PACKED, NOT_PACKED = 0.003, 0.2  # seconds for each token more that a pass verifies


def speeds_of_calls(world, seed, calls=3, tokens=40):
    """Returns the speed of each of the first calls with a pair, in units of plain decoding's."""
    draft, speeds = SimulatedDraft(world), []
    for number in range(calls):
        with contextlib.closing(world.call(draft.planner(), draft, seed=100 * seed + number)) as call:
            clock, made, _ = next(stand for stand in itertools.islice(call, 0, None, 2) if stand[1] >= tokens)
        speeds.append(made * world.verification / clock)
    return speeds


def mean_speeds(world, seeds=10):
    return [statistics.fmean(of_call) for of_call in zip(*(speeds_of_calls(world, seed) for seed in range(seeds)))]


@pytest.mark.parametrize("per_token, acceptance", quick_first([(PACKED, 0.6), (NOT_PACKED, 0.6), (NOT_PACKED, 0.8)], 2))
def test_the_first_short_calls_cost_next_to_nothing(per_token, acceptance):
    speeds = mean_speeds(on_one_cpu(acceptance, per_token))
    assert min(speeds) > (1.05 if per_token == PACKED else 0.95)


@pytest.mark.parametrize("module, constant, value", [(prober, "TRIAL_COST", -math.inf), (planner, "FIRST", (7, 8))])
def test_first_calls_that_try_what_they_cannot_pay_are_slow(monkeypatch, module, constant, value):
    """The mutants for the test above: drafting ahead is tried at once, or the first speculations are long."""
    monkeypatch.setattr(module, constant, value)
    assert min(mean_speeds(on_one_cpu(0.6, NOT_PACKED))) < 0.95


def seconds_of_the_slowest_row(world, plan, tokens=128, seeds=10):
    def of_call(seed):
        with contextlib.closing(world.call(fixed_planner(*plan), seed=seed)) as call:
            return next(clock for clock, _, fewest in call if fewest >= tokens)

    return statistics.fmean(map(of_call, range(seeds)))


def test_a_batch_is_not_drafted_for_where_its_slowest_row_would_end_later(monkeypatch):
    world, plans = World(0.5, rows=8, step=0.014, per_token=0.004, right=0.2), [(0, 0), (1, 0)]
    plain, drafted = (world.run(fixed_planner(*plan)) for plan in plans)
    assert drafted > 1.01 * plain  # in tokens of all rows
    plain, drafted = (seconds_of_the_slowest_row(world, plan) for plan in plans)
    assert drafted > 1.01 * plain
    assert mode_of_a_long_call(SimulatedDraft(world)) == PLAIN
    alone = Planner(dataclasses.replace(world.kind(None), ends_together=False))  # as in a running batch
    modes = modes_of_a_call(SimulatedDraft(world), 800, alone)
    assert statistics.mode(modes[400:]) != PLAIN
    monkeypatch.setattr(cost_model, "ROUNDS", math.inf)  # the mutant
    assert mode_of_a_long_call(SimulatedDraft(world)) != PLAIN


def rounds_until_ahead(disturbed):
    """Returns in which round a call begins to draft ahead if the machine is busy with something else in some rounds."""
    world, planner = dataclasses.replace(PAYING[AHEAD]), new_planner(PAYING[AHEAD])
    with contextlib.closing(world.call(planner, SimulatedDraft(world))) as call:
        for half_rounds in range(120):
            world.unseen = 0.3 if half_rounds // 2 in range(*disturbed) else 0.0
            next(call)
            if planner.plan.mode == AHEAD:
                return half_rounds // 2
    return 60


@pytest.mark.parametrize("first, last", [(3, 5), (3, 6), (4, 7)])
def test_rounds_that_were_disturbed_do_not_keep_a_call_plain(monkeypatch, first, last):
    assert rounds_until_ahead((first, last)) < 20
    monkeypatch.setattr(prober, "CLEAR_GAIN", math.inf)  # the mutant: tries only when that is paid for
    assert rounds_until_ahead((first, last)) > 30


CPUS = {
    "two cores that share their bandwidth": (on_one_cpu(0.8, PACKED, contention=1.5, alone=2.0), IN_TURN),
    "eight cores on two sockets": (on_one_cpu(0.8, PACKED, contention=1.1, alone=1.2), AHEAD),
}


@pytest.mark.parametrize("cpu", CPUS)
def test_the_cores_are_divided_only_where_that_is_faster(cpu):
    world, pays = CPUS[cpu]
    fixed = {IN_TURN: [(2, 0), (3, 0), (4, 0)], AHEAD: [(1, 8), (1, 16), (2, 8), (3, 8), (4, 8)]}
    best = {mode: max(world.run(fixed_planner(*plan), rounds=400) for plan in fixed[mode]) for mode in fixed}
    assert max(best, key=best.get) == pays and best[pays] > 1.15 * min(best.values())
    assert mode_of_a_long_call(SimulatedDraft(world)) == pays
    assert world.run(new_planner(world), rounds=600, skip=33) > 0.97 * best[pays]


def costs_ahead_are_those_in_turn(monkeypatch):
    def mixed(durations, init=Durations.__init__):
        init(durations)
        for by_mode in (durations.verification, durations.step):
            by_mode[AHEAD] = by_mode[IN_TURN]

    monkeypatch.setattr(Durations, "__init__", mixed)


def costs_ahead_follow_from_the_number_of_cores(monkeypatch):
    """The target has six of eight cores, the draft two of them."""
    verify, draft = CostModel.seconds_to_verify, CostModel.seconds_to_draft
    monkeypatch.setattr(
        CostModel, "seconds_to_verify", lambda self, mode, k: verify(self, IN_TURN, k) * (8 / 6 if mode == AHEAD else 1)
    )
    monkeypatch.setattr(CostModel, "seconds_of_a_pass", lambda self, k, budget: 8 / 2 * draft(self, IN_TURN, 1))


MUTANTS = [costs_ahead_are_those_in_turn, costs_ahead_follow_from_the_number_of_cores]


@pytest.mark.parametrize("mutate, cpu", [*zip(MUTANTS, CPUS)])
def test_costs_of_other_cores_mislead_the_plan(monkeypatch, mutate, cpu):
    """The mutants for the test above."""
    mutate(monkeypatch)
    world, pays = CPUS[cpu]
    assert mode_of_a_long_call(SimulatedDraft(world)) != pays


HALF_PAYS = {  # small models and many cores, where passes gain little by more cores
    Cpu(16, sockets=1, limit=6, size=1 / 3, overhead=0.3): True,
    Cpu(32, sockets=2, limit=8, size=1 / 5, overhead=0.05): True,
    Cpu(8, sockets=1, limit=3, size=1 / 20, overhead=0.1, acceptance=0.7): False,
    Cpu(4, sockets=1, limit=2, size=1 / 20, overhead=0.1, acceptance=0.7): False,
}


def speed_of_a_call(cpu, has_half):
    """Returns tokens per second of a planned call."""
    world = cpu.world(cpu.cores // (2 if has_half else 4))
    return world.run(new_planner(world), rounds=400, skip=33)


def second_call(cpu):
    """Returns whether the draft has half of the cores in it, and its tokens per second."""
    draft = SimulatedDraft(cpu.world(cpu.cores // 4))
    kind = draft.world.kind(temperature=1.0)
    assert not planner.asks_for_half(draft, draft, kind)  # nothing is known
    modes_of_a_call(draft, 100, draft.planner(temperature=1.0))
    has_half = planner.asks_for_half(draft, draft, kind)
    world = cpu.world(cpu.cores // (2 if has_half else 4))
    of_call = planner.planner_for(draft, draft, dataclasses.replace(kind, has_half=has_half))
    return has_half, world.run(of_call, rounds=400, skip=33)


@pytest.mark.parametrize("cpu", quick_first([*HALF_PAYS][::2] + [*HALF_PAYS][1::2], 2))
def test_the_draft_has_half_of_the_cores_where_that_is_faster_than_a_quarter(monkeypatch, cpu):
    by_share = {has_half: speed_of_a_call(cpu, has_half) for has_half in (False, True)}
    better = HALF_PAYS[cpu]
    assert by_share[better] > 1.08 * by_share[not better]
    has_half, speed = second_call(cpu)
    assert has_half == better and speed > 0.97 * by_share[better]
    monkeypatch.setattr(experience, "SLOW_DRAFT", math.inf if better else 0.0)  # the mutant
    has_half, speed = second_call(cpu)
    assert has_half != better and speed < 0.97 * by_share[better]


def mode_after_the_start(starting):
    """Returns the mode of most of the hundred rounds after the worker has started."""
    world = World(0.3, step=0.04, contention=1.7, starting=starting)
    return statistics.mode(modes_of_a_call(SimulatedDraft(world), 2 * (starting + 110))[2 * starting + 20 :])


@pytest.mark.parametrize("starting", [10, 40])
def test_plain_rounds_while_the_worker_starts_do_not_make_drafting_look_fast(monkeypatch, starting):
    assert mode_after_the_start(starting) == PLAIN
    monkeypatch.setattr(CostModel, "changes_durations", lambda self, now: False)  # the mutant
    assert mode_after_the_start(starting) != PLAIN


# ---------------------------------------------------------------- n-grams beside the draft

DRAFTS = {
    "a draft ahead": World(0.8),
    "a draft in turn": World(0.7, step=0.008, contention=2.0, right=0.2),
    "a batch": World(0.8, rows=4),
    "a useless draft": World(0.1, step=0.04),
}


def speed(world, lookahead="auto", **settings):
    """Tokens per second of a planned call, with n-grams beside the draft unless the settings name a fallback."""
    return world.run(new_planner(world, lookahead=lookahead, **settings), rounds=700, skip=40)


@pytest.mark.parametrize("draft", quick_first(["a draft ahead", "a useless draft", "a draft in turn", "a batch"], 2))
def test_texts_that_repeat_themselves_gain_by_ngrams(draft):
    world = dataclasses.replace(DRAFTS[draft], repeats=0.6)
    planner, plans = new_planner(world), []
    with contextlib.closing(world.call(planner)) as call:
        for _ in itertools.islice(call, 400):
            plans.append((planner.plan.mode == PLAIN, planner.plan.early))
    is_plain, ngrams = statistics.mode(plans)
    assert ngrams == 16 and "n-grams of up to 16 tokens" in planner.reason
    if draft != "a draft in turn":  # where n-grams beside the draft are as fast as n-grams alone
        assert is_plain == (draft == "a useless draft")
    assert speed(world) > 1.15 * speed(world, fallback="primary")


def plain_rounds_until_ngrams(limit=200):
    """Returns how many rounds after its text has begun to repeat itself a call without a draft verifies n-grams."""
    world = dataclasses.replace(DRAFTS["a useless draft"], repeats=0.6, ngram_acceptance=0.0)
    planner = new_planner(world)
    with contextlib.closing(world.call(planner)) as call:
        for _ in itertools.islice(call, 180):
            pass
        assert (planner.plan.mode, planner.plan.early) == (PLAIN, 0)
        world.ngram_acceptance = 0.97
        return next((n for n, _ in enumerate(itertools.islice(call, 2 * limit)) if planner.plan.early), 2 * limit) // 2


def test_a_text_that_begins_to_repeat_itself_is_noticed_where_nothing_is_drafted(monkeypatch):
    assert plain_rounds_until_ngrams() < 120
    compare = Proposers.compare

    def of_drafted_rounds(self, number):
        if self.plan.mode != PLAIN:
            compare(self, number)

    monkeypatch.setattr(Proposers, "compare", of_drafted_rounds)  # the mutant
    with pytest.raises(AssertionError):
        assert plain_rounds_until_ngrams() < 120


@pytest.mark.slow
@pytest.mark.parametrize("text", [{"repeats": 0.0}, {"repeats": 0.01}, {"repeats": 0.5, "ngram_acceptance": 0.3}])
@pytest.mark.parametrize("draft", DRAFTS)
def test_other_texts_lose_nothing_by_ngrams(draft, text):
    world = dataclasses.replace(DRAFTS[draft], **text)
    assert speed(world) > 0.98 * speed(world, fallback="primary")


@pytest.mark.slow
def test_ngrams_whose_acceptance_nobody_counts_cost_speed(monkeypatch):
    """The mutant for the test above: what is proposed counts as right."""
    observe = Rates.observe
    right = lambda record: dataclasses.replace(record, early_beside=[17 * (n > 0) for n in record.early_beside])  # noqa: E731
    monkeypatch.setattr(Rates, "observe", lambda self, before, now: observe(self, before, right(now)))
    with pytest.raises(AssertionError):
        test_other_texts_lose_nothing_by_ngrams("a draft ahead", {"repeats": 0.5, "ngram_acceptance": 0.3})


# ---------------------------------------------------------------- mutants


def ahead_is_never_tried(monkeypatch):
    monkeypatch.setattr(Prober, "_can_pay_a_trial", lambda self, costs: False)


def nothing_is_measured_again(monkeypatch):
    monkeypatch.setattr(Durations, "forget", lambda self, modes: None)


@pytest.mark.parametrize(
    "mutate, history, pays",
    [(ahead_is_never_tried, "short calls", AHEAD), (nothing_is_measured_again, "a draft that was very busy", AHEAD)],
)
def test_mutants_miss_what_pays(monkeypatch, mutate, history, pays):
    mutate(monkeypatch)
    assert mode_in_the_end(dataclasses.replace(PAYING[pays], **HISTORIES[history])) != pays
