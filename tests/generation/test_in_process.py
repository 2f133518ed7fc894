"""A draft that works in turn, in the target's process: it does nothing that nobody reads, and leaves nothing behind."""

import functools
import gc

import pytest
import torch
from transformers import GenerationConfig

import hf_ssd
from hf_ssd.cache.ragged import RaggedCache
from hf_ssd.distributed.assistant import DraftAssistant
from hf_ssd.distributed.target_ranks import TargetRanks
from hf_ssd.drafting.speculator import Speculator
from hf_ssd.rounds import AHEAD, IN_TURN, NOTHING

from ..helpers.thread_worker import ThreadWorker
from ..helpers.tiny import tiny_draft

IDS = torch.arange(2, 9)[None]


class Passes:
    """Counts the passes of a draft, and raises after some of them."""

    def __init__(self, draft):
        self.forward, self.count, self.most = draft.forward, 0, None
        draft.forward = functools.wraps(self.forward)(self)

    def __call__(self, *arguments, **options):
        self.count += 1
        if self.most is not None and self.count > self.most:
            raise RuntimeError("out of memory")
        return self.forward(*arguments, **options)


@pytest.fixture
def draft():
    return tiny_draft()


@pytest.fixture
def passes(target, draft) -> Passes:
    """The passes of a draft after its first call, in which the model is tried with this `forward`."""
    passes = Passes(draft)
    stats_of(target, draft, 1)
    passes.count = 0
    return passes


def stats_of(target, draft, count=9):
    options = {"max_new_tokens": count, "do_sample": False, "return_dict_in_generate": True}
    config = hf_ssd.SSDConfig(lookahead=6, asynchronous=False)
    return target.generate(IDS, assistant_model=draft, ssd_config=config, **options).ssd_stats


@pytest.mark.parametrize("count", [1, 2, 9])
def test_the_draft_drafts_nothing_after_the_last_round(target, draft, passes, count):
    stats = stats_of(target, draft, count)
    assert passes.count == 1 + sum(record.steps for record in stats.records)  # and one that reads the prompt


@pytest.mark.slow
@pytest.mark.parametrize("most", [0, 3], ids=["at the start", "in a round"])
def test_a_draft_that_fails_leaves_no_cache_behind(target, draft, passes, most):
    passes.most = most
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(one, RaggedCache) for one in gc.get_objects())
        stats = stats_of(target, draft)
        assert "out of memory" in stats.draft_failure and stats.generated_tokens == 9
        assert sum(isinstance(one, RaggedCache) for one in gc.get_objects()) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("is_apart", [False, True], ids=["in turn", "with a worker"])
def test_an_attribute_of_the_users_own_in_a_generation_config_is_left_to_the_user(target, draft, is_apart):
    """The draft's settings travel as JSON, which cannot hold it."""
    generation = GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0)
    generation.notes = {"of", "the", "user"}
    with DraftAssistant([ThreadWorker(tiny_draft())]) as worker:
        options = {"assistant_model": worker if is_apart else draft, "return_dict_in_generate": True}
        config = hf_ssd.SSDConfig(lookahead=3, budget=6, asynchronous=is_apart)
        stats = target.generate(IDS, generation_config=generation, ssd_config=config, **options).ssd_stats
    assert stats.draft_failure is None and {*stats.column("mode")} == {AHEAD if is_apart else IN_TURN}


def test_a_draft_that_fails_when_the_call_ends_costs_nothing(target, draft, monkeypatch):
    def fails(self):
        raise RuntimeError("while it learned")

    monkeypatch.setattr(Speculator, "end", fails)
    stats = stats_of(target, draft)
    assert stats.draft_failure is None and stats.generated_tokens == 9


def test_no_rank_waits_for_the_probabilities_of_tokens_that_are_certain(target, monkeypatch):
    """In a process that behaves as the leader of two."""
    leader = TargetRanks()
    leader.size = 2
    monkeypatch.setattr(TargetRanks, "share_random_state", lambda self, device: None)
    options = {"max_new_tokens": 40, "do_sample": True, "return_dict_in_generate": True}
    with DraftAssistant([ThreadWorker(tiny_draft())], ranks=leader) as assistant:
        output = target.generate(IDS, assistant_model=assistant, ssd_config=hf_ssd.SSDConfig(timeout=10.0), **options)
    assert output.ssd_stats.draft_failure is None and {*output.ssd_stats.records[0].sources} == {NOTHING}
