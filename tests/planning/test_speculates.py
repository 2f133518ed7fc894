"""A pair that pays drafts ahead with `SSDConfig()`, whatever the calls before were, and with whatever fallback."""

import gc
import time

import pytest

import hf_ssd
from hf_ssd.planning import planner
from hf_ssd.rounds import AHEAD, CUSTOM, PLAIN

from ..helpers.last_token import LastToken
from ..helpers.tiny import padded_batch, tiny_draft, tiny_model

NEW_TOKENS = 128
TWO = {"devices": ["cpu", "cpu"]}  # workers, which prepare a share of the outcomes each


def slow_target():
    """A target of which each pass takes so long that any draft pays."""
    target = hf_ssd.enable(tiny_model())
    target.register_forward_pre_hook(lambda *_: time.sleep(0.06))
    return target


def good_draft():
    """
    Disagrees so seldom that it pays, and so often that drafting ahead is clearly the best: with a perfect draft, 16
    tokens in turn take little longer for each token than a few ahead.
    """
    return tiny_draft(disagreement=0.01)


def call(target, assistant, new_tokens=NEW_TOKENS, **options):
    options = {"do_sample": False, "return_dict_in_generate": True, "ssd_config": hf_ssd.SSDConfig(), **options}
    output = target.generate(**padded_batch(1), assistant_model=assistant, max_new_tokens=new_tokens, **options)
    assert output.ssd_stats.draft_failure is None
    return output.ssd_stats


def call_ahead(*arguments, **options):
    """
    Returns the statistics of a call that drafts ahead: of the first call or, while other programs keep the cores busy,
    of a later one. Most rounds of each call draft; as soon as the pair is known, most are ahead, and some hit.
    """
    for _ in range(6):
        stats = call(*arguments, **options)
        modes = stats.column("mode")
        since = modes.index(AHEAD) if AHEAD in modes else len(modes)
        is_ahead = modes[since:].count(AHEAD) >= max(3, 0.6 * len(modes[since:]))
        if since <= 20 and is_ahead and sum(record.hits[0] for record in stats.records) > 0:
            return stats
        assert modes.count(PLAIN) < 0.5 * len(modes), modes
    raise AssertionError(modes)


@pytest.mark.slow
def test_several_drafts_draft_ahead():
    target = slow_target()
    with hf_ssd.launch_draft(good_draft(), num_threads=1, **TWO) as drafts:
        call(target, drafts, 1)
        call_ahead(target, drafts)


@pytest.mark.slow
@pytest.mark.parametrize("launch, budget", [({}, "auto"), (TWO, 1)])
def test_a_fallback_object_is_asked_and_drafts_ahead(launch, budget):
    target, fallback = slow_target(), LastToken()
    settings = {"ssd_config": hf_ssd.SSDConfig(fallback=fallback, budget=budget), "do_sample": True, "top_k": 8}
    with hf_ssd.launch_draft(good_draft(), num_threads=1, **launch) as drafts:
        records = call(target, drafts, **settings).records  # of a call that learns that drafting ahead pays
        records += call_ahead(target, drafts, **settings).records
    assert fallback.asked and any(CUSTOM in record.sources for record in records)


def test_a_call_that_is_all_plain_says_so_and_what_is_known_of_a_pair_ends_with_its_models(assistant):
    gc.collect()
    target, before = slow_target(), len(planner._pairs)
    stats = call(target, assistant, 4)
    assert set(stats.column("mode")) == {PLAIN} and "decoded plainly" in stats.reason and "0.0 ms" not in stats.reason
    assert len(planner._pairs) == before + 1
    del target
    gc.collect()
    assert len(planner._pairs) == before
