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
CONFIG = hf_ssd.SSDConfig(lookahead=6, asynchronous=False)


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


def passes_of(target, draft) -> Passes:
    """Returns the passes of a draft after its first call, in which the model is tried with this `forward`."""
    passes = Passes(draft)
    generate(target, draft, 1)
    passes.count = 0
    return passes


def generate(target, draft, count):
    options = {"max_new_tokens": count, "do_sample": False, "return_dict_in_generate": True}
    return target.generate(IDS, assistant_model=draft, ssd_config=CONFIG, **options)


@pytest.mark.parametrize("count", [1, 2, 9])
def test_the_draft_drafts_nothing_after_the_last_round(target, draft, count):
    passes = passes_of(target, draft)
    stats = generate(target, draft, count).ssd_stats
    assert passes.count == 1 + sum(record.steps for record in stats.records)  # and one that reads the prompt


def test_a_draft_that_would_fail_after_the_last_token_fails_in_no_call(target, draft):
    passes = passes_of(target, draft)
    generate(target, draft, 9)
    passes.count, passes.most = 0, passes.count - 1
    stats = generate(target, draft, 9).ssd_stats
    assert "out of memory" in stats.draft_failure and stats.generated_tokens == 9


@pytest.mark.parametrize("most", [0, 3], ids=["at the start", "in a round"])
def test_a_draft_that_fails_leaves_no_cache_behind(target, draft, most):
    passes = passes_of(target, draft)
    passes.most = most
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(one, RaggedCache) for one in gc.get_objects())
        assert "out of memory" in generate(target, draft, 9).ssd_stats.draft_failure
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
        output = target.generate(IDS, generation_config=generation, ssd_config=config, **options)
    modes = {record.mode for record in output.ssd_stats.records}
    assert output.ssd_stats.draft_failure is None and modes == {AHEAD if is_apart else IN_TURN}


def test_a_draft_that_fails_when_the_call_ends_costs_nothing(target, draft, monkeypatch):
    def fails(self):
        raise RuntimeError("while it learned")

    monkeypatch.setattr(Speculator, "end", fails)
    stats = generate(target, draft, 9).ssd_stats
    assert stats.draft_failure is None and stats.generated_tokens == 9


class TwoRanks(TargetRanks):
    """A process that behaves as the leader of two."""

    def __init__(self):
        super().__init__()
        self.size = 2

    def share_random_state(self, device):
        pass


def test_no_rank_waits_for_the_probabilities_of_tokens_that_are_certain(target):
    options = {"max_new_tokens": 40, "do_sample": True, "return_dict_in_generate": True}
    with DraftAssistant([ThreadWorker(tiny_draft())], ranks=TwoRanks()) as assistant:
        output = target.generate(IDS, assistant_model=assistant, ssd_config=hf_ssd.SSDConfig(timeout=10.0), **options)
    stats = output.ssd_stats
    assert stats.draft_failure is None and {*stats.records[0].sources} == {NOTHING}
