"""Requests that join a running batch whose draft reads hidden states of the target."""

import pytest
import torch

import hf_ssd
from hf_ssd.config import SSDConfig
from hf_ssd.distributed import transport
from hf_ssd.distributed.assistant import DraftAssistant
from hf_ssd.drafting.head_drafter import HeadPrefix
from hf_ssd.drafting.heads import loading
from hf_ssd.drafting.heads.mtp import MtpHead
from hf_ssd.drafting.speculator import Speculator
from hf_ssd.generation.target import Features
from hf_ssd.rounds import AHEAD, IN_TURN, PREPARED

from ..helpers.assistants import dflash_draft, gemma4_assistant, gemma4_target
from ..helpers.heads import drafted_in, tiny_head, tiny_mtp_head
from ..helpers.preparing import preparing
from ..helpers.suites import quick_first
from ..helpers.thread_worker import ThreadWorker
from ..helpers.tiny import tiny_draft, tiny_model
from .test_continuous import MODES, After, accepted_counts, all_results, coupled, equal_to_alone, mixed, plainly, run

OPTIONS = {**MODES[IN_TURN], "on_draft_failure": "raise"}


def eagle3():
    target = hf_ssd.enable(tiny_model())
    return target, tiny_head(target), OPTIONS


def mtp():
    target = hf_ssd.enable(tiny_model())
    loading._heads[target] = {MtpHead: tiny_mtp_head(target)}  # as if it had been loaded from the checkpoint
    return target, None, {**OPTIONS, "drafter": "mtp", "budget": "auto"}


def dflash():
    target = hf_ssd.enable(tiny_model())
    return target, dflash_draft(target), OPTIONS


def gemma4():
    target = hf_ssd.enable(gemma4_target())
    return target, gemma4_assistant(target), OPTIONS


def hot():
    """Requests that sample so evenly that an untrained head is often right, and a greedy one."""
    return [{**one, "temperature": 3.0} if one["do_sample"] else one for one in mixed()]


def alone(target, draft, settings, requests):
    """Calls of their own: their texts, the counts that they accept, and what is drafted."""
    call, texts = coupled(target, draft, **settings), []
    drafted = drafted_in(lambda: texts.extend(call(number, one) for number, one in enumerate(requests)))
    return texts, call.accepted, drafted


def is_as_alone(pair, expected):
    """Whether texts are those of calls alone, and whether accepted counts and drafted tokens are."""
    (target, draft, settings), (texts, counts, drafted), found = pair, expected, []
    in_batch = drafted_in(lambda: found.extend(run(target, draft, hot(), settings, seeds=range(5))))
    assert [one.error for one in found] == [None] * 5
    assert {record.mode for one in found for record in one.stats.records} == {IN_TURN}
    is_equal = all(torch.equal(one.output, text) for one, text in zip(found, texts))
    # A call ends with its row, while here something may be drafted for a row that has just ended, beside others.
    are_equal = all(in_batch.get(text) == tokens for text, tokens in drafted.items())
    return is_equal, are_equal and accepted_counts([one.stats.records for one in found]) == counts


@pytest.mark.parametrize("make", [eagle3, mtp, dflash, pytest.param(gemma4, marks=pytest.mark.slow)])
def test_a_head_drafts_for_a_row_what_it_drafts_alone(make):
    expected = alone(*(pair := make()), hot())
    assert sum(sum(count) for counts in expected[1].values() for count in counts) > 10 and len(expected[2]) > 50
    assert is_as_alone(pair, expected) == (True, True)


def of_the_earlier_row(monkeypatch):
    """The target keeps the features of the row that had the place before."""
    monkeypatch.setattr(
        Features, "take_row", lambda self, row, texts: self.lengths.__setitem__(row, sum(map(len, texts)))
    )


def states_of_the_earlier_row(monkeypatch):
    """The head keeps the states of the row that had the place before, also after the tokens that are verified."""

    def read(self, row, *others):
        if others[0] == 0:
            self.known[row] = 0
        super(HeadPrefix, self).read(row, *others)

    monkeypatch.setattr(HeadPrefix, "read", read)


def before_the_features(monkeypatch):
    """The head reads a text without its features."""
    inputs_of = HeadPrefix._inputs

    def of_zeros(self, rows, columns):
        states = self.states.values.clone()
        if isinstance(rows, int):
            self.states.values[rows] = 0
        inputs = inputs_of(self, rows, columns)
        self.states.values = states
        return inputs

    monkeypatch.setattr(HeadPrefix, "_inputs", of_zeros)


@pytest.mark.parametrize(
    "mutant, make",
    quick_first([(of_the_earlier_row, eagle3), (states_of_the_earlier_row, dflash), (before_the_features, eagle3)]),
)
def test_mistakes_are_noticed(mutant, make, monkeypatch):
    expected = alone(*(pair := make()), hot())
    mutant(monkeypatch)
    assert is_as_alone(pair, expected) == (True, False)


def test_rows_join_while_the_head_prepares(monkeypatch):
    """Just in time it drafts what it drafts in turn, after hits too."""
    target, head, settings = eagle3()
    texts, _, drafted = alone(target, head, settings, hot())
    found = []
    with preparing() as hits:
        ours = drafted_in(lambda: found.extend(run(target, head, hot(), settings, seeds=range(5))))
    assert all(torch.equal(one.output, text) for one, text in zip(found, texts))
    common = drafted.keys() & ours.keys()
    assert sum(hits) > 3 and len(common) > 40 and all(drafted[text] == ours[text] for text in common)


def test_rows_join_a_worker_with_a_head():
    target, head, settings = eagle3()
    texts, *_ = alone(target, head, settings, hot())
    with hf_ssd.launch_draft(head, num_threads=1) as assistant:
        is_equal, records = equal_to_alone(
            target, assistant, MODES[AHEAD], lambda number, _: texts[number], hot(), seeds=range(5)
        )
    assert is_equal and {record.mode for of_one in records for record in of_one} == {AHEAD}
    assert sum(sum(record.hits) for of_one in records for record in of_one) > 3


def test_a_worker_takes_features_of_long_prompts(monkeypatch):
    """Their message is larger than others may be."""
    target, head, _ = eagle3()
    monkeypatch.setattr(transport, "LARGEST_PAYLOAD", 10_000)
    with DraftAssistant([ThreadWorker(head)]) as assistant:
        config = SSDConfig(lookahead=3, budget=8, on_draft_failure="raise")
        with hf_ssd.continuous_batching(target, assistant, config, max_rows=1) as manager:
            one = {"input_ids": torch.arange(300)[None] % 90 + 2, "max_new_tokens": 9, "do_sample": False}
            assert torch.equal(manager.generate(**one), plainly(target)(0, one))
        assert manager.rows.draft.failure is None


def test_a_draft_that_takes_over_gets_all_features(monkeypatch):
    """The first draft fails while rows are decoded; the next request that joins brings another, which reads all."""
    target, head, settings = eagle3()
    requests = [{**one, "max_new_tokens": n} for one, n in zip(hot()[:2], (60, 20))]
    texts, _, drafted = alone(target, head, settings, requests)
    config, look_up, seen = SSDConfig(lookahead=3, asynchronous=False), Speculator.look_up, []

    def failing(self, *told):
        seen.append(self)
        if len(seen) == 6:
            raise RuntimeError("of the draft")
        return look_up(self, *told)

    monkeypatch.setattr(Speculator, "look_up", failing)
    with hf_ssd.continuous_batching(target, head, config, max_rows=2) as manager:

        def join():
            ids.append(manager.add_request(**requests[1], seed=1))

        def call():
            ids.append(manager.add_request(**requests[0], seed=0, streamer=After(join, 12)))
            assert manager.requests[ids[0]][0].has_ended.wait(60)

        ids = []
        ours = drafted_in(call)
        found = [manager.requests[one][0] for one in ids]
        all_results(manager, ids)
        assert manager.rows.draft.failure is None and len({*seen}) == 2
    assert all(torch.equal(one.output, text) for one, text in zip(found, texts))
    assert len(ours) > 30 and all(drafted.get(text, tokens) == tokens for text, tokens in ours.items())
    later = {len(text) for text in ours if text[:5] == tuple(requests[0]["input_ids"][0].tolist())}
    assert max(later) > 5 + 40 and len(drafted.keys() & ours.keys()) > 25


@pytest.mark.slow
def test_the_layer_of_the_target_drafts_after_a_miss():
    """The fallback follows the texts of all rows, beside a draft that reads tokens alone."""
    target, _, settings = mtp()
    texts, _, drafted = alone(target, None, settings, hot())
    found, options = [], {**OPTIONS, "budget": 3, "fallback": "mtp"}
    with preparing():
        ours = drafted_in(lambda: found.extend(run(target, tiny_draft(), hot(), options, seeds=range(5))))
    assert all(torch.equal(one.output, text) for one, text in zip(found, texts))
    common = drafted.keys() & ours.keys()
    assert len(common) > 30 and all(drafted[text] == ours[text] for text in common)
    sources = {source for one in found for record in one.stats.records for source in record.sources}
    assert {"mtp", PREPARED} <= sources
