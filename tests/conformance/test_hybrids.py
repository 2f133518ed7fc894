"""Models that keep a recurrent state between layers with attention: whole calls are those of plain generate()."""

import dataclasses
import itertools
import re
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

from ..helpers.families import likely_draft, sharp_model, tiny_config
from ..helpers.preparing import preparing
from ..helpers.tiny import padded_batch, tiny_draft, tiny_model
from .test_families import check_cache, check_draft, check_family, check_target
from .test_turns import differences

QUICK = ("qwen3_next", "bamba", "lfm2", "falcon_h1")
GREEDY = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
GREEDY |= {"return_dict_in_generate": True, "output_logits": True}
PAIRS = {}


def pair_of(family):
    if family not in PAIRS:
        target = hf_ssd.enable(sharp_model(tiny_config(family)))
        PAIRS[family] = target, likely_draft(target)
    return PAIRS[family]


@pytest.fixture
def short_refeeds(monkeypatch):
    monkeypatch.setattr(recurrent, "WORTH_A_PASS", 6)


def in_turn(draft, lookahead=4, **settings):
    return {
        "assistant_model": draft,
        "ssd_config": hf_ssd.SSDConfig(lookahead=lookahead, budget=8, asynchronous=False, **settings),
    }


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
    options = {**GREEDY, "eos_token_id": [int(plain.sequences[0, 14]), int(plain.sequences[2, 16])]}
    options |= {"repetition_penalty": 1.1, "max_new_tokens": 12}
    expected = target.generate(**inputs, **options).sequences
    with preparing():
        output = target.generate(**inputs, **options, **in_turn(hybrid))
    assert torch.equal(output.sequences, expected) and output.ssd_stats.draft_failure is None
    assert set(output.ssd_stats.column("mode")) == {AHEAD}


@pytest.mark.slow
def test_a_branch_that_is_cut_short_goes_on_from_its_states(short_refeeds):
    config, inputs = tiny_config("bamba"), padded_batch(2)
    target, draft = hf_ssd.enable(sharp_model(config)), sharp_model(config)
    plain, looks = target.generate(**inputs, **GREEDY), itertools.count()
    with preparing(outcome_arrived=lambda: next(looks) % 4 == 3) as hits:
        output = target.generate(**inputs, **GREEDY, **in_turn(draft))
    assert torch.equal(output.sequences, plain.sequences) and output.ssd_stats.tokens_per_round > 4.8
    assert any(hits) and {record.grown for record in output.ssd_stats.records} & {1, 2, 3}


def test_the_budget_of_a_hybrid_draft_is_bounded_by_its_memory(short_refeeds, monkeypatch):
    """A fixed budget in the draft, and an automatic one by the plan, which says so."""
    config, inputs = tiny_config("lfm2"), padded_batch(2)
    target, draft = hf_ssd.enable(sharp_model(config)), sharp_model(config)
    monkeypatch.setattr(RecurrentDraft, "bytes_of_a_row", 100)
    monkeypatch.setattr(recurrent_prefix.devices, "free_memory", lambda device: 2 * 2 * 100 * 9)
    with preparing() as hits:
        output = target.generate(**inputs, **GREEDY, **in_turn(draft))
    assert any(hits) and {(record.budget, record.states) for record in output.ssd_stats.records} == {(2, 9)}

    planner = Planner(CallKind(hf_ssd.SSDConfig(), 2, 97))
    planner.durations.step[IN_TURN].observe(1, 1e-4)
    planner.durations.branches.observe(8, 1e-4)
    now, seconds = RoundRecord(AHEAD, 2, 2, ["prepared"] * 2, accepted=[2, 2], states=9), {"verify_seconds": 0.1}
    for _ in range(9):
        planner.observe(now, dataclasses.replace(now, **seconds))
    assert planner.costs.largest_budget(4) == 2 and planner.plan.mode == AHEAD
    assert planner.plan.budget <= planner.costs.largest_budget(planner.plan.lookahead)
    assert "room for 9 recurrent states of a row" in planner.reason


# ---------------------------------------------------------------- ends, and plans


@pytest.mark.parametrize("family", ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in QUICK[:2])])
def test_later_turns_are_those_of_plain_generation(family, short_refeeds):
    """Rows end at different lengths."""
    target, draft = pair_of(family)
    plain = target.generate(**padded_batch(4), max_new_tokens=30, do_sample=False, eos_token_id=None)
    tokens = [int(plain[0, 9 + 3]), int(plain[1, 9 + 8]), int(plain[2, 9 + 12])]
    options = {"eos_token_id": tokens, "max_new_tokens": 20, "pad_token_id": 0}
    assert not differences(target, draft, options, mask_of_pads=True, padded=True)


def test_a_call_that_ends_before_what_some_rows_have(short_refeeds):
    """The criterion looks at the whole batch, and the returned cache ends where it stops it."""
    target, draft = pair_of("qwen3_next")

    def long_enough(input_ids, scores):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 9 + 17, dtype=torch.bool)

    options = {**padded_batch(3), **GREEDY, "stopping_criteria": [long_enough]}
    plain = target.generate(**options)
    output = target.generate(**options, **in_turn(draft, 7))
    assert torch.equal(output.sequences, plain.sequences) and plain.sequences.shape[1] == 9 + 17
    check_cache(output[CACHE], plain[CACHE])


def test_a_hybrid_target_is_drafted_for_by_a_plan(short_refeeds, monkeypatch):
    """Automatic lookahead: the modes are those of a planned call, and the tokens those of plain generate()."""
    monkeypatch.setattr(CostModel, "plain", lambda *_: 1e-9)  # drafting always pays
    target, draft = pair_of("qwen3_next")
    inputs, options = padded_batch(2), {**GREEDY, "max_new_tokens": 60}
    plain = target.generate(**inputs, **options)
    with preparing() as hits:
        output = target.generate(
            **inputs, **options, assistant_model=draft, ssd_config=hf_ssd.SSDConfig(asynchronous=False)
        )
    assert torch.equal(output.sequences, plain.sequences)
    assert {"in_turn", "ahead"} & {record.mode for record in output.ssd_stats.records}
    assert any(hits) and output.ssd_stats.tokens_per_round > 1.1


# ---------------------------------------------------------------- refused


def refusal(target, draft, **options):
    with pytest.raises(ValueError) as error:
        target.generate(**padded_batch(1), **GREEDY, **in_turn(draft), **options)
    return str(error.value)


def test_a_hybrid_that_is_to_draft_in_parallel_is_refused(target):
    hybrid = sharp_model(tiny_config("qwen3_next"))
    hybrid.config.pard_token = 3
    with pytest.raises(ValueError, match="cannot forget the mask tokens of parallel drafting"):
        target.generate(**padded_batch(1), **GREEDY, **in_turn(hybrid, drafter="parallel"))
    output = target.generate(**padded_batch(1), **GREEDY, **in_turn(hybrid))
    assert output.ssd_stats.draft_failure is None and "in_turn" in output.ssd_stats.column("mode")


@pytest.mark.parametrize("family", ["recurrent_gemma", "jamba"])
def test_a_family_whose_state_several_tokens_spoil_is_refused(family):
    """recurrent_gemma keeps it elsewhere; Mamba-1 of Jamba begins anew where several tokens are fed."""
    target = hf_ssd.enable(sharp_model(tiny_config(family)))
    reasons = "keeps no recurrent state in its cache|other logits for several tokens behind its recurrent state"
    if family == "recurrent_gemma":  # transformers 5.17 cannot run it with a cache that is still empty
        reasons += "|does not take a 4D attention mask"
    assert re.search(reasons, refusal(target, tiny_draft()))
    with pytest.raises(ValueError, match=reasons):
        check_supported(target, drafts=True)


def test_models_that_are_shared_by_ranks_or_use_flash_attention_are_refused(monkeypatch):
    target, draft = pair_of("lfm2")
    monkeypatch.setattr("hf_ssd.generation.checks.is_flash_attention", lambda model: model is target)
    assert "recurrent layers, which is not supported" in refusal(target, draft)


def test_a_compiled_hybrid_runs_uncompiled(short_refeeds):
    target = sharp_model(tiny_config("lfm2"))
    draft, inputs = likely_draft(target), padded_batch(2)
    hf_ssd.enable(target)
    plain = target.generate(**inputs, **GREEDY)
    target.compile(backend="eager")
    output = target.generate(**inputs, **GREEDY, **in_turn(draft))
    assert torch.equal(output.sequences, plain.sequences)
    assert not any(record.compiles for record in output.ssd_stats.records)
    draft = sharp_model(tiny_config("lfm2"))
    draft.load_state_dict(target.state_dict())
    draft.compile(backend="eager")
    with preparing() as hits:
        output = target.generate(**inputs, **GREEDY, **in_turn(draft))
    assert torch.equal(output.sequences, plain.sequences) and any(hits) and output.ssd_stats.tokens_per_round > 4.8


def test_the_trial_notices_a_state_that_is_not_copied(monkeypatch):
    """The mutant for the trial of a family."""

    states_without_a_copy(monkeypatch)
    with pytest.raises(ValueError, match="several tokens behind its recurrent state"):
        check_supported(sharp_model(tiny_config("qwen3_next")))
    check_supported(tiny_model())


# ---------------------------------------------------------------- mutants


def states_without_a_copy(monkeypatch):
    copies = RecurrentModel.copies

    def shares(self, sources):
        states = (sources[0] or (None, 0))[0]
        if states and all(one[0] is states and one[1] == row for row, one in enumerate(sources)):
            return states
        return copies(self, sources)

    monkeypatch.setattr(RecurrentModel, "copies", shares)


def a_lost_token(monkeypatch):
    feed = RecurrentModel._feed

    def loses(self, at, count, ends, kept):
        if count > 1 and min(at):
            at, count, kept = [column + 1 for column in at], count - 1, (kept - 1).clamp(min=0)
            for row in self.computed(list(range(len(at)))):
                self.states[row][at[row]] = self.states[row][at[row] - 1]
        return feed(self, at, count, ends, kept)

    monkeypatch.setattr(RecurrentModel, "_feed", loses)


def fillers_in_a_state(monkeypatch):
    feed = RecurrentModel._feed

    def keeps(self, at, count, ends, kept):
        logits = feed(self, at, count, ends, kept)
        for place, row in enumerate(self.computed(list(range(len(at))))):
            if at[row] + count > ends[row]:
                self.states[row] |= dict.fromkeys((at[row], ends[row]), (self.cache.current_states(), place))
        return logits

    monkeypatch.setattr(RecurrentModel, "_feed", keeps)


def a_neighbours_state(monkeypatch):
    feed = RecurrentModel._feed

    def mixes(self, at, count, ends, kept):
        logits, rows = feed(self, at, count, ends, kept), self.computed(list(range(len(at))))
        for place, row in enumerate(rows):
            if at[row] + count <= ends[row]:
                self.states[row][at[row] + count] = self.cache.current_states(), (place + 1) % len(rows)
        return logits

    monkeypatch.setattr(RecurrentModel, "_feed", mixes)


def a_neighbours_branch(monkeypatch):
    made = RecurrentBranches.__init__

    def starts_elsewhere(self, *arguments):
        made(self, *arguments)
        self.current = self.current[1:] + self.current[:1]

    monkeypatch.setattr(RecurrentBranches, "__init__", starts_elsewhere)


def an_adopted_neighbour(monkeypatch):
    adopt = RecurrentBranches.adopt

    def adopts_elsewhere(self, chosen, forks):
        self.states = [[one.roll(1, 0) for one in states] for states in self.states]
        return adopt(self, chosen, forks)

    monkeypatch.setattr(RecurrentBranches, "adopt", adopts_elsewhere)


MUTANTS = [states_without_a_copy, a_lost_token, fillers_in_a_state, a_neighbours_state]
OF_DRAFTS = [a_neighbours_branch, an_adopted_neighbour]


@pytest.mark.parametrize(
    "mutate, drafts", [*itertools.product(MUTANTS, [False, True]), *((mutate, True) for mutate in OF_DRAFTS)]
)
def test_a_wrong_state_is_noticed(mutate, drafts, short_refeeds, monkeypatch):
    """By the greedy tokens of a target, and by the acceptance of a draft."""
    config = tiny_config("qwen3_next")
    target, draft = hf_ssd.enable(sharp_model(config)), sharp_model(config)
    for model in (target, draft):  # which would notice some of them first
        check_supported(model, drafts=True)
        check_supported(model, rows=3, lookahead=4)
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        if drafts:
            check_draft(target, draft)
        else:
            check_target(target, None, {3: [4]})


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
    alone, in_thread, entered = target.generate(**padded_batch(1), **GREEDY), [], []
    check_supported(target)

    def generate_in_a_thread(module, inputs, _):
        if entered or inputs[0].shape[1] == 9 or threading.current_thread() is not threading.main_thread():
            return
        entered.append(True)
        thread = threading.Thread(target=lambda: in_thread.append(target.generate(**padded_batch(1), **GREEDY)))
        thread.start()
        thread.join()

    with mamba.in_proj.register_forward_hook(generate_in_a_thread):
        output = target.generate(**padded_batch(1), **GREEDY, **in_turn(draft))
    assert torch.equal(output.sequences, alone.sequences) and output.ssd_stats.tokens_per_round > 1.1
    for ours, theirs in zip(in_thread[0].logits, alone.logits, strict=True):
        torch.testing.assert_close(ours, theirs)
