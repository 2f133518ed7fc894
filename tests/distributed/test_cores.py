import contextlib
import os
import queue
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList

import hf_ssd
from hf_ssd.distributed import cores, transport
from hf_ssd.distributed.assistant import DraftAssistant
from hf_ssd.distributed.cores import CoreShare, available_cores, divide_cores, use_cores
from hf_ssd.generation import loop
from hf_ssd.planning.fixed_plan import FixedPlan
from hf_ssd.rounds import AHEAD, IN_TURN, PLAIN, Plan

from ..helpers.at_length import AtLength
from ..helpers.tiny import SIZES, padded_batch, tiny_model


@pytest.mark.parametrize(
    "available, threads, target, drafts",
    [
        (range(2), None, (0,), [(1,)]),
        (range(8), None, (0, 1, 2, 3, 4, 5), [(6, 7)]),
        (range(8), 5, (0, 1, 2), [(3, 4, 5, 6, 7)]),
        ([3], None, (3,), [(3,)]),
        (range(2), 2, (0, 1), [(0, 1)]),
        (range(8), 2, (0, 1, 2, 3), [(4, 5), (6, 7)]),
        (range(2), 1, (0,), [(1,), (1,)]),  # not enough: the drafts share
    ],
)
def test_division(monkeypatch, available, threads, target, drafts):
    monkeypatch.setattr(cores, "available_cores", lambda: tuple(available))
    assert divide_cores(threads, drafts=len(drafts)) == CoreShare(target, tuple(drafts))
    for impossible in (0, len(available) + 1):
        with pytest.raises(ValueError, match=f"between 1 and the {len(available)} cores"):
            divide_cores(impossible)


@pytest.mark.parametrize("available, half", [(2, None), (4, (2, 3)), (9, (5, 6, 7, 8))])
def test_one_draft_may_have_half_of_four_or_more_cores(monkeypatch, available, half):
    monkeypatch.setattr(cores, "available_cores", lambda: tuple(range(available)))
    share = divide_cores()
    assert share.half == (half and CoreShare(tuple(range(half[0])), (half,)))
    assert half is None or share.half.all == share.all
    assert divide_cores(1).half is None and divide_cores(drafts=2).half is None


USUAL, HALF, ALL = [3], [2, 3], [0, 1, 2, 3]


@pytest.mark.parametrize(
    "calls, expected",
    [
        ([], USUAL),
        ([(False, True)], USUAL),
        ([(True, True)], HALF),
        ([(False, False)], ALL),
        ([(True, True), (True, True)], HALF),
        ([(True, True), (False, True)], USUAL),
        ([(True, False), (False, False)], USUAL),  # while one target waits, the other one computes
    ],
)
def test_a_draft_of_several_calls_has_what_all_of_them_leave(monkeypatch, calls, expected):
    pinned = []
    monkeypatch.setattr(cores, "pin", pinned.append)
    monkeypatch.setattr(cores, "_threads", set)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    draft = cores.DraftCores(USUAL, ALL, half=HALF)
    for before in ([], [(True, True)], [(False, False)]):
        draft.serve(before)
        draft.serve(calls)
        assert pinned[-1] == expected and draft.are_taken_in_turn == (expected == ALL)


@contextlib.contextmanager
def a_thread(cores=None):
    """The number that the system gives to a thread, which lives for the length of the block."""
    numbers, end = queue.Queue(), threading.Event()

    def live():
        if cores is not None:
            os.sched_setaffinity(0, cores)
        numbers.put(threading.get_native_id())
        end.wait()

    thread = threading.Thread(target=live)
    thread.start()
    yield numbers.get()
    end.set()
    thread.join()


def test_threads_do_not_keep_the_cores_of_the_call_they_were_made_in():
    available = os.sched_getaffinity(0)
    if len(available) < 2:
        pytest.skip("needs two cores")
    first, other = ({core} for core in sorted(available)[:2])
    with contextlib.ExitStack() as threads:
        pinned_before = threads.enter_context(a_thread(first))
        with use_cores(tuple(first)):
            made_within = threads.enter_context(a_thread())
            pinned_within = threads.enter_context(a_thread(other))
            assert os.sched_getaffinity(made_within) == first
        assert os.sched_getaffinity(made_within) == available
        assert os.sched_getaffinity(pinned_before) == first and os.sched_getaffinity(pinned_within) == other
        with use_cores(tuple(first)):
            with use_cores(tuple(other)):
                made_deeper = threads.enter_context(a_thread())
        assert os.sched_getaffinity(made_deeper) == available


@pytest.fixture
def two_threads():
    if len(available_cores()) < 2:
        pytest.skip("needs two cores")
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_blocks_give_threads_and_cores_back_within_another_one_and_after_an_error(two_threads):
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    first, other = available_cores()[:2]
    with pytest.raises(KeyError), use_cores((first, other)):
        with use_cores((first,)):
            assert torch.get_num_threads() == 1 and available_cores() == (first,)
        assert torch.get_num_threads() == 2 and available_cores() == (first, other)
        raise KeyError
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == before


@pytest.fixture
def passes():
    """The number of torch's threads and of cores in each pass of a target."""
    return []


@pytest.fixture
def target(passes):
    """Of which each pass takes so long that any draft pays."""
    target = hf_ssd.enable(tiny_model())

    def before_a_pass(*_):
        passes.append((torch.get_num_threads(), len(available_cores())))
        time.sleep(0.015)

    target.register_forward_pre_hook(before_a_pass)
    return target


class OneAfterTheOther(FixedPlan):
    """Five rounds of each mode."""

    def __init__(self):
        super().__init__(hf_ssd.SSDConfig(lookahead=2, budget=3))
        self.plans = {AHEAD: self.plan, IN_TURN: Plan(IN_TURN, 2, 2), PLAIN: Plan(PLAIN)}
        self.plan, self.rounds = self.plans[IN_TURN], 0

    def observe(self, before, now):
        self.rounds += 1
        self.plan = self.plans[(IN_TURN, AHEAD, PLAIN)[self.rounds // 5 % 3]]


def call(target, assistant, **options):
    options = {"assistant_model": assistant, "max_new_tokens": 40, "ssd_config": hf_ssd.SSDConfig(), **options}
    return target.generate(**padded_batch(1), **options, return_dict_in_generate=True).ssd_stats


class WatchedDraft(LlamaForCausalLM):
    """Notes in a file how many threads and cores each pass has, and whether it is a prefill."""

    waits = None  # of the process

    def forward(self, input_ids, **inputs):
        if WatchedDraft.waits is None:
            WatchedDraft.waits = note_waits(setattr)
        new = Path(self.config.notes + ".new")
        new.write_text("\n".join(map(str, WatchedDraft.waits)))
        new.replace(self.config.notes + ".waits")  # at once: the worker may be killed in the middle of a pass
        with open(self.config.notes, "a") as notes:
            notes.write(f"{torch.get_num_threads()} {len(available_cores())} {input_ids.shape[1]}\n")
        return super().forward(input_ids, **inputs)


@pytest.fixture
def watched(tmp_path):
    """A draft, and a function that returns the threads and cores of its passes since the last time."""
    notes, draft = tmp_path / "notes", WatchedDraft(LlamaConfig(**SIZES, notes=str(tmp_path / "notes"))).eval()
    draft.load_state_dict(tiny_model().state_dict())

    def passes():
        lines = notes.read_text().splitlines() if notes.exists() else []
        notes.unlink(missing_ok=True)
        return [tuple(map(int, line.split()[:2])) for line in lines]

    return draft, passes


@pytest.mark.slow
def test_each_side_leaves_cores_to_the_other_only_while_that_works(two_threads, target, passes, watched, monkeypatch):
    """A call in plain mode, or in turn, is not slower than `generate()` because a worker is there."""
    monkeypatch.setattr(loop, "planner_for", lambda *_: OneAfterTheOther())
    (first, other), (draft, of_draft) = available_cores()[:2], watched
    everything = 2, len(available_cores())
    with hf_ssd.launch_draft(draft, cores=CoreShare((first,), ((other,),))) as assistant:
        for _ in range(2):
            passes.clear()
            of_draft()
            stats, seen = call(target, assistant), of_draft()
            modes = stats.column("mode")
            assert stats.draft_failure is None and {AHEAD, IN_TURN, PLAIN} <= {*modes}
            prefill, *rounds = passes[-len(modes) - 1 :]  # the first call tries the model before
            assert rounds == [(1, 1) if mode == AHEAD else everything for mode in modes]
            assert stats.column("divided") == [mode == AHEAD for mode in modes]
            assert prefill == everything and seen[0] == (1, 1)
            in_turn = sum(record.steps for record in stats.records if record.mode == IN_TURN)  # a pass for each token
            assert seen.count((2, 2)) in (in_turn, in_turn + 2) and in_turn > 5  # an answer that came too late
            assert {*seen} == {(1, 1), (2, 2)} and seen.count((1, 1)) > 5
    assert (torch.get_num_threads(), len(available_cores())) == everything


@pytest.mark.slow
def test_a_draft_has_half_in_the_calls_that_say_so(two_threads, target, passes, watched, monkeypatch):
    monkeypatch.setattr(loop, "planner_for", lambda *_: OneAfterTheOther())
    (first, other), (draft, of_draft) = available_cores()[:2], watched
    share = CoreShare((first, other), ((other,),), half=CoreShare((first,), ((first, other),)))
    with hf_ssd.launch_draft(draft, cores=share) as assistant:
        for has_half in (False, True, False):
            monkeypatch.setattr(loop, "asks_for_half", lambda *_, has_half=has_half: has_half)
            passes.clear()
            of_draft()
            modes, (_, *seen) = call(target, assistant).column("mode"), of_draft()  # the first may be of the last call
            ahead = {seen for seen, mode in zip(passes[-len(modes) :], modes) if mode == AHEAD}
            assert ahead == {(1, 1) if has_half else (2, 2)}
            assert {*seen} == {(2, 2)} if has_half else {*seen} == {(1, 1), (2, 2)}


def test_a_worker_that_starts_has_its_cores_and_the_rounds_are_marked(two_threads, target, passes, monkeypatch):
    first, other = available_cores()[:2]
    with hf_ssd.launch_draft(tiny_model(), cores=CoreShare((first,), ((other,),))) as assistant:
        call(target, assistant, max_new_tokens=1)  # tries the model
        passes.clear()
        monkeypatch.setattr(DraftAssistant, "state", property(lambda self: "starting"))
        monkeypatch.setattr(DraftAssistant, "open_session", lambda *_: None)
        stats = call(target, assistant, max_new_tokens=10)
    assert {*passes} == {(1, 1)} and len(passes) == 10
    assert stats.column("mode") == [PLAIN] * 9 and stats.column("divided") == [True] * 9


@pytest.mark.parametrize("mode", [pytest.param(IN_TURN, marks=pytest.mark.slow), AHEAD])
def test_who_waits_in_turn_leaves_the_cores_to_the_other_side(two_threads, watched, monkeypatch, mode):
    """A wait that spins on a core on which the other side computes made a verification ten times as long."""
    (first, other), (draft, _) = available_cores()[:2], watched
    noted = note_waits(monkeypatch.setattr)
    config = hf_ssd.SSDConfig(lookahead=2, budget=3, fallback="primary", asynchronous=mode == AHEAD)
    with hf_ssd.launch_draft(draft, cores=CoreShare((first,), ((other,),))) as assistant:
        noted.clear()
        modes = call(hf_ssd.enable(tiny_model()), assistant, ssd_config=config).column("mode")
    assert {*modes} == {mode} and len(modes) > 10
    assert {*noted} == {0.0 if mode == IN_TURN else transport.AWAKE}
    waits = [float(line) for line in (Path(draft.config.notes + ".waits")).read_text().split()]
    assert {*waits[-5:-1]} == {*noted}  # the last wait is that for another call
    assert waits[2:5] == [0.0, 0.0, 0.0]  # for a call, in two parts, and for its first outcome, during the prefill


def note_waits(set_attribute) -> list[float]:
    """Notes from now on how long the waits of this process spin."""
    noted, wait = [], transport.wait

    def note(work, deadline, awake=transport.AWAKE):
        noted.append(awake)
        return wait(work, deadline, awake)

    set_attribute(transport, "wait", note)
    return noted


@pytest.mark.parametrize("mode", [IN_TURN, AHEAD])
def test_a_draft_that_is_killed_leaves_its_cores_to_the_target(two_threads, target, passes, watched, mode):
    (first, other), everything = available_cores()[:2], (2, len(available_cores()))
    config = hf_ssd.SSDConfig(lookahead=1 + (mode == IN_TURN), budget=4, asynchronous=mode == AHEAD)
    with hf_ssd.launch_draft(watched[0], cores=CoreShare((first,), ((other,),))) as assistant:
        kill = LogitsProcessorList([AtLength(21, assistant.workers[0].process.popen.kill)])
        stats = call(target, assistant, max_new_tokens=40, ssd_config=config, logits_processor=kill)
    assert stats.draft_failure is not None and stats.records[0].mode == mode
    seen = passes[-len(stats.records) :]
    assert seen[0] == ((1, 1) if mode == AHEAD else everything) and seen[-1] == everything
    if mode == IN_TURN:
        assert {*watched[1]()} == {(1, 1), (2, 2)} and {*seen} == {everything}
