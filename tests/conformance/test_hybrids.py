"""Models that keep a recurrent state between layers with attention: whole calls are those of plain generate()."""

import dataclasses
import functools
import itertools
import threading

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module

import hf_ssd
from hf_ssd.cache import recurrent
from hf_ssd.cache.cache_name import CACHE
from hf_ssd.cache.recurrent import RecurrentModel
from hf_ssd.cache.recurrent_draft import RecurrentBranches, RecurrentDraft
from hf_ssd.cache.trial import check_supported
from hf_ssd.drafting import recurrent_prefix
from hf_ssd.planning.cost_model import CostModel
from hf_ssd.planning.experience import CallKind
from hf_ssd.planning.planner import Planner
from hf_ssd.rounds import AHEAD, IN_TURN, RoundRecord

from ..helpers.comparing import GREEDY, as_plain, generate
from ..helpers.families import likely_draft, sharp_model, sharp_pair, tiny_config
from ..helpers.mutants import instead_of
from ..helpers.preparing import preparing
from ..helpers.tiny import padded_batch, tiny_model
from .test_families import check_cache, check_draft, check_family, check_target

QUICK = ("qwen3_next", "bamba", "lfm2", "falcon_h1")


@functools.cache
def pair_of(family):
    target = hf_ssd.enable(sharp_model(tiny_config(family)))
    return target, likely_draft(target)


@pytest.fixture
def short_refeeds(monkeypatch):
    monkeypatch.setattr(recurrent, "WORTH_A_PASS", 6)


@pytest.mark.parametrize("family", QUICK)
def test_tokens_logits_and_states_are_those_of_plain_generate(family, short_refeeds):
    """As a target, and as a draft, of which a wrong state or a copy of the wrong columns would lose acceptance."""
    check_family(family, {3: [4]})


def test_refeeds_are_shortened_by_passes_of_their_own(monkeypatch):
    passes, counts, feed = [], [], RecurrentModel._feed
    monkeypatch.setattr(RecurrentModel, "_feed", lambda *arguments: passes.append(1) or feed(*arguments))
    for worth in (6, 1000):
        passes.clear()
        monkeypatch.setattr(recurrent, "WORTH_A_PASS", worth)
        check_target(pair_of("qwen3_next")[0], None, {3: [7]})
        counts.append(len(passes))
    assert counts[0] > counts[1]


# ---------------------------------------------------------------- hybrid drafts


def test_a_hybrid_drafts_for_a_target_with_attention(target):
    """And a row that ends, and a penalty."""
    hybrid = sharp_model(tiny_config("qwen3_next"))
    inputs = padded_batch(3)
    plain = target.generate(**inputs, **GREEDY)
    options = {"eos_token_id": [int(plain.sequences[0, 14]), int(plain.sequences[2, 16])], "max_new_tokens": 12}
    with preparing():
        output, _ = as_plain(target, hybrid, inputs, repetition_penalty=1.1, **options)
    assert set(output.ssd_stats.column("mode")) == {AHEAD}


@pytest.mark.slow
def test_a_branch_that_is_cut_short_goes_on_from_its_states(short_refeeds):
    (target, draft), looks = sharp_pair("bamba"), itertools.count()
    with preparing(outcome_arrived=lambda: next(looks) % 4 == 3) as hits:
        output, _ = as_plain(target, draft, padded_batch(2), {"budget": 8})
    assert output.ssd_stats.tokens_per_round > 4.8
    assert any(hits) and {record.grown for record in output.ssd_stats.records} & {1, 2, 3}


def test_the_budget_of_a_hybrid_draft_is_bounded_by_its_memory(short_refeeds, monkeypatch):
    """A fixed budget in the draft, and an automatic one by the plan, which says so."""
    target, draft = sharp_pair("lfm2")
    monkeypatch.setattr(RecurrentDraft, "bytes_of_a_row", 100)
    monkeypatch.setattr(recurrent_prefix.devices, "free_memory", lambda device: 2 * 2 * 100 * 9)
    with preparing() as hits:
        output = generate(target, draft, padded_batch(2), {"budget": 8})
    assert any(hits) and {(record.budget, record.states) for record in output.ssd_stats.records} == {(2, 9)}

    planner = Planner(CallKind(hf_ssd.SSDConfig(), 2, 97))
    planner.costs.durations.step[IN_TURN].observe(1, 1e-4)
    planner.costs.durations.branches.observe(8, 1e-4)
    now, seconds = RoundRecord(AHEAD, 2, 2, ["prepared"] * 2, accepted=[2, 2], states=9), {"verify_seconds": 0.1}
    for _ in range(9):
        planner.observe(now, dataclasses.replace(now, **seconds))
    assert planner.costs.largest_budget(4) == 2 and planner.plan.mode == AHEAD
    assert planner.plan.budget <= planner.costs.largest_budget(planner.plan.lookahead)
    assert "room for 9 recurrent states of a row" in planner.reason


# ---------------------------------------------------------------- ends, and plans


def test_a_call_that_ends_before_what_some_rows_have(short_refeeds):
    """The criterion looks at the whole batch, and the returned cache ends where it stops it."""
    target, draft = pair_of("qwen3_next")

    def long_enough(input_ids, scores):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 9 + 17, dtype=torch.bool)

    output, plain = as_plain(target, draft, padded_batch(3), {"lookahead": 7}, stopping_criteria=[long_enough])
    assert plain.sequences.shape[1] == 9 + 17
    check_cache(output[CACHE], plain[CACHE])


def test_a_hybrid_target_is_drafted_for_by_a_plan(short_refeeds, monkeypatch):
    """Automatic lookahead: the modes are those of a planned call, and the tokens those of plain generate()."""
    monkeypatch.setattr(CostModel, "plain", lambda *_: 1e-9)  # drafting always pays
    target, draft = pair_of("qwen3_next")
    with preparing() as hits:
        of_config = {"lookahead": "auto", "budget": "auto"}
        output, _ = as_plain(target, draft, padded_batch(2), of_config, max_new_tokens=60)
    assert {"in_turn", "ahead"} & {record.mode for record in output.ssd_stats.records}
    assert any(hits) and output.ssd_stats.tokens_per_round > 1.1


# ---------------------------------------------------------------- refused


def test_a_hybrid_that_is_to_draft_in_parallel_is_refused(target):
    hybrid = sharp_model(tiny_config("qwen3_next"))
    hybrid.config.pard_token = 3
    with pytest.raises(ValueError, match="cannot forget the mask tokens of parallel drafting"):
        generate(target, hybrid, padded_batch(1), {"drafter": "parallel"})
    assert "in_turn" in generate(target, hybrid, padded_batch(1)).ssd_stats.column("mode")


def test_a_compiled_hybrid_runs_uncompiled(short_refeeds):
    (target, draft), inputs = sharp_pair("lfm2"), padded_batch(2)
    plain = target.generate(**inputs, **GREEDY).sequences
    target.compile(backend="eager")
    draft.compile(backend="eager")
    with preparing() as hits:
        output = generate(target, draft, inputs)
    assert torch.equal(output.sequences, plain) and any(hits) and output.ssd_stats.tokens_per_round > 4.8
    assert not any(record.compiles for record in output.ssd_stats.records)


def test_the_trial_notices_a_state_that_is_not_copied(monkeypatch):
    """The mutant for the trial of a family."""
    states_without_a_copy(monkeypatch)
    with pytest.raises(ValueError, match="several tokens behind its recurrent state"):
        check_supported(sharp_model(tiny_config("qwen3_next")))
    check_supported(tiny_model())


# ---------------------------------------------------------------- mutants


@instead_of(RecurrentModel, "copies")
def states_without_a_copy(copies, self, sources):
    states = (sources[0] or (None, 0))[0]
    if states and all(one[0] is states and one[1] == row for row, one in enumerate(sources)):
        return states
    return copies(self, sources)


@instead_of(RecurrentModel, "_feed")
def a_lost_token(feed, self, at, count, ends, kept):
    if count > 1 and min(at):
        at, count, kept = [column + 1 for column in at], count - 1, (kept - 1).clamp(min=0)
        for row in self.computed(list(range(len(at)))):
            self.states[row][at[row]] = self.states[row][at[row] - 1]
    return feed(self, at, count, ends, kept)


@instead_of(RecurrentModel, "_feed")
def fillers_in_a_state(feed, self, at, count, ends, kept):
    logits = feed(self, at, count, ends, kept)
    for place, row in enumerate(self.computed(list(range(len(at))))):
        if at[row] + count > ends[row]:
            self.states[row] |= dict.fromkeys((at[row], ends[row]), (self.cache.current_states(), place))
    return logits


@instead_of(RecurrentModel, "_feed")
def a_neighbours_state(feed, self, at, count, ends, kept):
    logits, rows = feed(self, at, count, ends, kept), self.computed(list(range(len(at))))
    for place, row in enumerate(rows):
        if at[row] + count <= ends[row]:
            self.states[row][at[row] + count] = self.cache.current_states(), (place + 1) % len(rows)
    return logits


@instead_of(RecurrentBranches, "__init__")
def a_neighbours_branch(init, self, *arguments):
    init(self, *arguments)
    self.current = self.current[1:] + self.current[:1]


@instead_of(RecurrentBranches, "adopt")
def an_adopted_neighbour(adopt, self, chosen, forks):
    self.states = [[one.roll(1, 0) for one in states] for states in self.states]
    return adopt(self, chosen, forks)


MUTANTS = [states_without_a_copy, a_lost_token, fillers_in_a_state, a_neighbours_state]


@pytest.fixture(scope="module")
def tried_pair():
    """Two models that have been tried before a mutant is there, which a trial would notice first."""
    pair = sharp_pair("qwen3_next")
    for model in pair:
        check_supported(model, drafts=True)
        check_supported(model, rows=3, lookahead=4)
    return pair


@pytest.mark.slow
@pytest.mark.parametrize("mutate", MUTANTS)
def test_a_wrong_state_of_a_target_is_noticed(mutate, tried_pair, short_refeeds, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check_target(tried_pair[0], None, {3: [4]})


@pytest.mark.slow
@pytest.mark.parametrize("mutate", [*MUTANTS, a_neighbours_branch, an_adopted_neighbour])
def test_a_wrong_state_of_a_draft_is_noticed(mutate, tried_pair, short_refeeds, monkeypatch):
    """By its acceptance."""
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check_draft(*tried_pair)


@pytest.mark.parametrize("hooked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_thread_that_uses_the_model_during_a_pass_meets_its_own_settings(hooked, short_refeeds):
    """The bounds of Mamba-2's step sizes and its chunks differ in our passes, and belong to these alone."""
    config = tiny_config("bamba")
    config.time_step_limit = (0.0, 0.3)  # bounds that change logits
    target = sharp_model(config)
    draft, mamba = likely_draft(target), target.model.layers[0].mamba
    if hooked:  # as accelerate does for a model on several devices
        for module in (target, target.model, mamba):
            add_hook_to_module(module, ModelHook())
    hf_ssd.enable(target)
    options = {**padded_batch(1), **GREEDY, "output_logits": True}
    alone, in_thread, entered = target.generate(**options), [], []
    check_supported(target)

    def generate_in_a_thread(module, inputs, _):
        if entered or inputs[0].shape[1] == 9 or threading.current_thread() is not threading.main_thread():
            return
        entered.append(True)
        thread = threading.Thread(target=lambda: in_thread.append(target.generate(**options)))
        thread.start()
        thread.join()

    with mamba.in_proj.register_forward_hook(generate_in_a_thread):
        output = generate(target, draft, padded_batch(1))
    assert torch.equal(output.sequences, alone.sequences) and output.ssd_stats.tokens_per_round > 1.1
    for ours, theirs in zip(in_thread[0].logits, alone.logits, strict=True):
        torch.testing.assert_close(ours, theirs)
