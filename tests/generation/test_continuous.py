"""Requests that join a running batch: each has the tokens of a call of its own, whatever its neighbours do."""

import contextlib
import functools
import os
import signal
import threading

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import LogitsProcessor
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.streamers import BaseStreamer

import hf_ssd
from hf_ssd import devices
from hf_ssd.cache.ragged import RaggedLayer
from hf_ssd.config import SSDConfig
from hf_ssd.generation import running_rows
from hf_ssd.planning.planner import last_planner
from hf_ssd.rounds import AHEAD, IN_TURN, PLAIN

from ..helpers import vocabularies
from ..helpers.families import HYBRIDS, sharp_model, tiny_config
from ..helpers.heads import tiny_head
from ..helpers.last_token import LastToken
from ..helpers.tiny import FAMILIES, VOCAB, ready, tiny_draft, tiny_model

LENGTHS = (5, 23, 1, 12, 40)
MODES = {
    PLAIN: {"lookahead": 0},
    IN_TURN: {"lookahead": 3, "budget": 8, "asynchronous": False},
    AHEAD: {"lookahead": 3, "budget": 8},
}


def prompts(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (1, length), generator=generator) for length in lengths]


QUICK_HYBRIDS = [("qwen3_next", IN_TURN)]
OF_HYBRIDS = [
    pytest.param(name, mode, marks=[pytest.mark.slow] * ((name, mode) not in QUICK_HYBRIDS))
    for name in HYBRIDS
    for mode in (PLAIN, IN_TURN)
]


class After(BaseStreamer):
    """Does something in the thread that decodes, after the first tokens of a request."""

    def __init__(self, action, tokens=2):
        self.action, self.left = action, tokens

    def put(self, value):
        if value.dim() == 1:
            self.left -= len(value)
            if self.left <= 0 and self.action is not None:
                action, self.action = self.action, None
                action()

    def end(self):
        pass


def all_results(manager, ids):
    return [list(manager.request_id_iter(one))[-1] for one in ids]


def ended(manager, **one):
    """Lets a request join, and returns it when it has ended."""
    request = manager.requests[manager.add_request(**one)][0]
    assert request.has_ended.wait(300)
    if request.error is not None:
        raise request.error
    return request


def run(target, draft, of_requests, settings, max_rows=3, prefill_chunk=8, seeds=None):
    """Lets the first request begin, and all others come once it has tokens. Returns the requests, which have ended."""
    names = []

    def add_others():
        for number in range(1, len(of_requests)):
            if seeds is not None:
                torch.manual_seed(seeds[number])
            names.append(manager.add_request(**of_requests[number]))

    with hf_ssd.continuous_batching(target, draft, SSDConfig(**settings), max_rows, prefill_chunk) as manager:
        if seeds is not None:
            torch.manual_seed(seeds[0])
        first = ended(manager, **of_requests[0], streamer=After(add_others))
        others = [manager.requests[name][0] for name in names]
        all_results(manager, names)
        return [first, *others]


def equal_to_alone(target, draft, settings, alone, of_requests, **options):
    """Whether all requests have the tokens of calls of their own, and which counts were accepted in each."""
    expected = [alone(number, one) for number, one in enumerate(of_requests)]
    found = run(target, draft, of_requests, settings, **options)
    assert [one.error for one in found] == [None] * len(found)
    is_equal = all(torch.equal(one.output, other) for one, other in zip(found, expected))
    return is_equal, [one.stats.records for one in found]


def greedy(lengths=LENGTHS, tokens=(30, 9, 14, 20, 11)):
    options = {"do_sample": False}
    return [{"input_ids": ids, "max_new_tokens": n, **options} for ids, n in zip(prompts(lengths), tokens)]


def plainly(target):
    return lambda number, one: target.generate(**one, ssd_config=None)


@pytest.mark.parametrize("family, mode", OF_HYBRIDS)
def test_rows_of_hybrids_join(family, mode):
    """Target and draft have recurrent states, which a row brings when it joins."""
    config = tiny_config(family)
    target, draft = hf_ssd.enable(sharp_model(config)), sharp_model(config, noise=0.02)
    is_equal, records = equal_to_alone(target, draft, MODES[mode], plainly(target), greedy())
    assert is_equal and (sum(sum(record.accepted) for of_one in records for record in of_one) > 0) == (mode != PLAIN)


def mixed():
    """Sampled requests of different settings, and a greedy one."""
    options = [{"temperature": 0.7}, {"top_k": 20}, {"do_sample": False}, {"repetition_penalty": 1.3}, {"top_p": 0.9}]
    return [{**one, "do_sample": True, **own} for one, own in zip(greedy(), options)]


def coupled(target, draft, **settings):
    """A call of its own, which samples coupled and drafts in turn, and the counts that it accepts."""
    config = SSDConfig(**{**MODES[IN_TURN], "verification": "coupled", **settings})

    def alone(number, one):
        torch.manual_seed(number)
        output = target.generate(**one, assistant_model=draft, ssd_config=config, return_dict_in_generate=True)
        alone.accepted[number] = [record.accepted for record in output.ssd_stats.records]
        return output.sequences

    alone.accepted = {}
    return alone


def accepted_counts(records):
    """Returns the counts of each request after its first verification."""
    return {number: [record.accepted for record in of_one[1:]] for number, of_one in enumerate(records)}


def sampled(target, draft, mode=IN_TURN, drafts=None):
    alone = coupled(target, draft)
    is_equal, records = equal_to_alone(target, drafts or draft, MODES[mode], alone, mixed(), seeds=range(5))
    return is_equal, accepted_counts(records) == alone.accepted, records


@functools.cache
def of_calls(family):
    """Models, the texts of plain generation, and the counts that coupled calls accept, which have the same texts."""
    target, draft = hf_ssd.enable(tiny_model(family)), tiny_draft(family)
    alone, texts = coupled(target, draft), [plainly(target)(0, one) for one in greedy()]
    assert all(torch.equal(alone(number, one), text) for number, (one, text) in enumerate(zip(greedy(), texts)))
    return target, draft, texts, alone.accepted


QUICK = [("llama", PLAIN), ("mistral", IN_TURN), ("gemma", AHEAD)]
OTHERS = [(name, mode) for name in FAMILIES for mode in MODES if (name, mode) not in QUICK]
OF_FAMILIES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]


@pytest.mark.parametrize("family, mode", OF_FAMILIES)
def test_greedy_tokens_are_those_of_a_call(family, mode):
    target, draft, texts, accepted = of_calls(family)
    drafts = hf_ssd.launch_draft(draft, num_threads=1) if mode == AHEAD else draft
    is_equal, records = equal_to_alone(target, drafts, MODES[mode], lambda number, _: texts[number], greedy())
    if mode == AHEAD:
        drafts.close()
    assert is_equal and {record.mode for of_one in records for record in of_one} == {mode}
    hits = sum(sum(record.hits) for of_one in records for record in of_one)
    assert (hits > 0) == (mode == AHEAD)
    # The first verification of a row that joins has no tokens of the draft; then all are as in the call.
    assert mode == PLAIN or accepted_counts(records) == accepted
    assert any(count for counts in accepted.values() for (count,) in counts)


@pytest.mark.parametrize("mode", [IN_TURN, pytest.param(AHEAD, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_rows_that_join_verify_trees(family, mode):
    target, draft, texts, _ = of_calls(family)
    settings = {**MODES[mode], "tree_nodes": 8}
    is_equal, records = equal_to_alone(target, draft, settings, lambda number, _: texts[number], greedy())
    records = [record for of_one in records for record in of_one]
    assert is_equal and {8} <= {record.nodes for record in records} <= {0, 8}
    assert any(record.took_sibling(0) for record in records)


def test_a_seed_gives_the_tokens_of_a_coupled_call(target, draft):
    """The draft proposes what it would alone: with the warpers and the noise of the request, whatever its place."""
    assert sampled(target, draft)[:2] == (True, True)


def test_a_seed_gives_the_tokens_of_a_coupled_call_in_a_worker(target, draft, assistant):
    is_equal, _, records = sampled(target, draft, AHEAD, assistant)
    assert is_equal and any(sum(record.hits) for of_one in records for record in of_one)  # a busy draft is late


def of_the_place(monkeypatch):
    """The draft's noise is that of the row's place."""
    make = running_rows.FaultTolerantDraft.join
    monkeypatch.setattr(
        running_rows.FaultTolerantDraft,
        "join",
        lambda self, row, tokens, options, seed: make(self, row, tokens, options, seed + 1),
    )


def not_cleared(monkeypatch):
    """A row that joins takes the columns of the first row."""
    take = RaggedLayer.take_row
    monkeypatch.setattr(RaggedLayer, "take_row", lambda self, place, theirs: take(self, 0, theirs))


@pytest.mark.parametrize("mutant, expected", [(of_the_place, (True, False)), (not_cleared, (False, False))])
def test_mutants_are_noticed(mutant, expected, target, draft, monkeypatch):
    alone = coupled(target, draft)
    of_calls = [alone(number, one) for number, one in enumerate(mixed())]
    mutant(monkeypatch)
    found = run(target, draft, mixed(), MODES[IN_TURN], seeds=range(5))
    accepted = accepted_counts([one.stats.records for one in found])
    is_equal = all(one.output is not None and torch.equal(one.output, own) for one, own in zip(found, of_calls))
    assert (is_equal, accepted == alone.accepted) == expected


def test_a_planned_batch_has_the_same_tokens(target, draft, assistant):
    is_equal, records = equal_to_alone(target, assistant, {}, plainly(target), greedy(tokens=(60, 50, 40, 40, 40)))
    assert is_equal and sum(sum(record.accepted) for of_one in records for record in of_one) > 0
    assert not last_planner(target, assistant).costs.kind.ends_together


@settings(max_examples=8)
@given(st.data())
def test_whenever_requests_join(target, draft, data):
    count = data.draw(st.integers(1, 6))
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=count, max_size=count))
    tokens = data.draw(st.lists(st.integers(1, 25), min_size=count, max_size=count))
    settings = MODES[data.draw(st.sampled_from([PLAIN, IN_TURN]))]
    places = {"max_rows": data.draw(st.integers(1, 4)), "prefill_chunk": data.draw(st.integers(1, 12))}
    of_requests = greedy(lengths, tokens)
    of_requests[0]["max_new_tokens"] += 3  # the others come when it has some
    is_equal, _ = equal_to_alone(target, draft, settings, plainly(target), of_requests, **places)
    assert is_equal


# ---------------------------------------------------------------- what a request is


def test_outputs_come_as_the_tokens_do(target, draft):
    one = greedy()[0]
    expected = plainly(target)(0, one)[0, 5:].tolist()
    with hf_ssd.continuous_batching(target, draft, SSDConfig(**MODES[IN_TURN])) as manager:
        outputs = list(manager.request_id_iter(manager.add_request(**one, streaming=True)))
        assert manager.generate(**one).tolist() == [one["input_ids"][0].tolist() + expected]
    texts = [output.generated_tokens for output in outputs]
    assert 5 < len(texts) < 30 and all(expected[: len(text)] == text for text in texts) and texts[-1] == expected
    assert [output.status for output in outputs[-2:]] == [RequestStatus.DECODING, RequestStatus.FINISHED]


def test_requests_have_padding_and_ends_of_their_own(target, draft):
    requests = greedy(tokens=(30, 30, 30, 30, 30))
    for one in requests[1:3]:
        text = plainly(target)(0, one)[0, one["input_ids"].shape[1] :].tolist()
        one["eos_token_id"] = text[7]
    ids = torch.cat([torch.zeros(1, 3, dtype=torch.long), requests[0]["input_ids"]], dim=1)
    requests[0] |= {"input_ids": ids, "attention_mask": (torch.arange(8) >= 3).long()[None]}
    expected = [plainly(target)(0, one).shape[1] for one in requests]
    is_equal, _ = equal_to_alone(target, draft, MODES[IN_TURN], plainly(target), requests)
    assert is_equal and len({*expected}) == 5


class Raises(LogitsProcessor):
    def __init__(self, after=3):
        self.left = after

    def __call__(self, input_ids, scores):
        self.left -= 1
        if not self.left:
            raise KeyError("of the user")
        return scores


def raising():
    raise KeyError("of the user")


@pytest.mark.parametrize("of_bad", [{"logits_processor": [Raises()]}, {"streamer": After(raising, 3)}])
def test_what_a_request_raises_ends_it_alone(of_bad, target, draft):
    good = greedy()[0]
    expected = plainly(target)(0, good)
    with hf_ssd.continuous_batching(target, draft, SSDConfig(**MODES[IN_TURN])) as manager:
        bad = []
        add = After(lambda: bad.append(manager.add_request(**greedy()[1], **of_bad)))
        assert torch.equal(manager.generate(**good, streamer=add), expected)
        (output,) = all_results(manager, bad)
        assert output.status == RequestStatus.FAILED and output.error == "KeyError: 'of the user'"
        assert torch.equal(manager.generate(**good), expected)


def test_a_cancelled_request_leaves_its_place(target, draft):
    with hf_ssd.continuous_batching(target, draft, SSDConfig(**MODES[IN_TURN]), max_rows=1) as manager:
        cancel = After(lambda: manager.cancel_request("first"))
        manager.add_request(prompts()[0], "first", max_new_tokens=200, do_sample=False, streamer=cancel)
        manager.add_request(prompts()[1], "waits", max_new_tokens=200, do_sample=False)
        manager.cancel_request("waits")
        assert torch.equal(manager.generate(**greedy()[1]), plainly(target)(0, greedy()[1]))
        for name in ("first", "waits"):
            (output,) = all_results(manager, [name])
            assert output.error.startswith("Cancelled") and len(output.generated_tokens) < 20


@pytest.mark.parametrize("make", [lambda target: tiny_draft(), tiny_head], ids=["a model", "a head"])
def test_a_killed_worker_costs_no_token_and_the_next_request_gets_another(make, target):
    requests = [{**one, "max_new_tokens": n} for one, n in zip(greedy(), (50, 20))]
    with hf_ssd.launch_draft(make(target), num_threads=1) as assistant:
        kill = After(lambda: os.kill(assistant.workers[0].worker_info["pid"], signal.SIGKILL), 6)
        with hf_ssd.continuous_batching(target, assistant, SSDConfig(**MODES[AHEAD])) as manager:
            ids = [manager.add_request(**requests[0], streamer=kill), manager.add_request(**requests[1])]
            found = [manager.requests[one][0] for one in ids]
            all_results(manager, ids)
            assert [found[0].stats.records[place].mode for place in (0, -1)] == [AHEAD, PLAIN]
            ready(assistant)
            ids = [manager.add_request(**requests[1])]
            found.append(manager.requests[ids[0]][0])
            all_results(manager, ids)
        assert assistant.restarts == 1 and manager.rows.draft.failure is None
    for one, number in zip(found, (0, 1, 1)):
        assert torch.equal(one.output, plainly(target)(number, requests[number]))
    assert {record.mode for record in found[2].stats.records} == {AHEAD}


def test_a_closed_batch_ends_its_requests_and_its_thread(target, draft):
    manager, closing = hf_ssd.continuous_batching(target, draft, SSDConfig(**MODES[IN_TURN])), threading.Event()
    with pytest.raises(RuntimeError, match="with"):
        manager.add_request(prompts()[0])
    with manager:
        name = manager.add_request(prompts()[0], max_new_tokens=200, do_sample=False, streamer=After(closing.set))
        assert closing.wait(20)
    assert not manager.thread.is_alive() and "closed" in manager.get_result(name).error
    with pytest.raises(RuntimeError, match="does not run"):
        manager.add_request(prompts()[0])


def test_what_cannot_join_is_refused(target, draft):
    with hf_ssd.continuous_batching(target, draft, SSDConfig(**MODES[IN_TURN])) as manager:
        with pytest.raises(ValueError, match="one prompt, and not 2"):
            manager.add_request(torch.ones(2, 3, dtype=torch.long))
        with pytest.raises(ValueError, match="num_beams"):
            manager.add_request(prompts()[0], num_beams=2)
        manager.add_request(prompts()[0], "name", max_new_tokens=2)
        with pytest.raises(ValueError, match="already"):
            manager.add_request(prompts()[0], "name")
    with pytest.raises(ValueError, match="at least 1"):
        hf_ssd.continuous_batching(target, draft, max_rows=0)


def test_only_so_many_requests_wait(target, draft):
    one = {"max_new_tokens": 30, "do_sample": False}
    config = SSDConfig(**MODES[IN_TURN])
    with hf_ssd.continuous_batching(target, draft, config, max_rows=1, max_waiting=1) as manager:
        refused = []

        def add():
            ids.append(manager.add_request(prompts()[1], **one))
            with pytest.raises(hf_ssd.BatchIsFull, match="1 requests wait"):
                manager.add_request(prompts()[2], **one)
            refused.append(True)

        ids = [manager.add_request(prompts()[0], **one, streamer=After(add))]
        all_results(manager, ids[:1])
        all_results(manager, ids[1:])
    assert refused == [True]


def test_a_request_waits_for_memory_that_running_rows_will_free(target, draft, monkeypatch):
    """The cache has no room for a longer row while another is decoded; alone it is tried in any case."""
    monkeypatch.setattr(devices, "free_memory", lambda device: 0)
    alive = []
    watch = After(lambda: None)
    watch.put = lambda value: alive.append(len(manager.rows.live))
    with hf_ssd.continuous_batching(target, draft, SSDConfig(**MODES[IN_TURN])) as manager:
        short, long = ({"max_new_tokens": n, "do_sample": False, "streamer": watch} for n in (20, 80))
        ids = [manager.add_request(prompts()[0], **short), manager.add_request(prompts()[1], **long)]
        outputs = all_results(manager, ids)
    assert [len(output.generated_tokens) for output in outputs] == [20, 80] and max(alive) == 1


def test_a_bound_draft_and_settings_are_those_of_the_batch(draft):
    model = hf_ssd.enable(tiny_model(), draft, SSDConfig(**MODES[IN_TURN]))
    with hf_ssd.continuous_batching(model) as manager:
        request = ended(manager, **greedy()[0])
    assert {record.mode for record in request.stats.records} == {IN_TURN}


def test_the_seed_of_a_request_is_that_of_torch(target, draft):
    one, alone = mixed()[0], coupled(target, draft)
    with hf_ssd.continuous_batching(target, draft, SSDConfig(**MODES[IN_TURN])) as manager:
        texts = [manager.generate(**one, seed=seed) for seed in (5, 5, 6)]
    assert torch.equal(texts[0], alone(5, one)) and torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_a_request_returns_what_its_call_returns(target, draft):
    one = greedy()[0] | {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    with hf_ssd.continuous_batching(target, draft, SSDConfig(**MODES[IN_TURN])) as manager:
        ours, plain = manager.generate(**one), target.generate(**one, ssd_config=None)
    assert torch.equal(ours.sequences, plain.sequences) and sum(ours.ssd_stats.column("lookahead")) > 0
    for values, expected in ((ours.scores, plain.scores), (ours.logits, plain.logits)):
        torch.testing.assert_close(torch.stack(values), torch.stack(expected), atol=1e-4, rtol=1e-4)


TWO_TOKENIZERS = {
    "tokenizer": vocabularies.tokenizer(vocabularies.TARGET),
    "assistant_tokenizer": vocabularies.tokenizer(vocabularies.DRAFT),
}
KINDS = {  # the draft, how its worker is launched, settings, and what the batch gets besides
    "several drafts": (tiny_draft, {"devices": ["cpu", "cpu"]}, {}, {}),
    "parallel": (lambda: tiny_draft(pard_token=5), {}, {"drafter": "parallel"}, {}),
    "n-grams after a miss": (tiny_draft, {}, {"fallback": "ngram"}, {}),
    "random tokens after a miss": (tiny_draft, {}, {"fallback": "random"}, {}),
    "an object after a miss": (tiny_draft, {}, {"fallback": LastToken()}, {}),
    "another tokenizer": (vocabularies.renamed_draft, {}, {}, TWO_TOKENIZERS),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind_of_draft_join(kind, target):
    make, launch, more, tokenizers = KINDS[kind]
    config, requests = SSDConfig(**MODES[AHEAD], **more), greedy(tokens=(40, 30, 30, 30, 30))
    expected = [plainly(target)(0, one) for one in requests]
    with contextlib.ExitStack() as stack:
        assistant = stack.enter_context(hf_ssd.launch_draft(make(), num_threads=1, **launch))
        manager = stack.enter_context(hf_ssd.continuous_batching(target, assistant, config, 3, **tokenizers))
        ids = [manager.add_request(**one) for one in requests]
        found = [manager.requests[one][0] for one in ids]
        assert [output.error for output in all_results(manager, ids)] == [None] * 5
        assert all(torch.equal(one.output, other) for one, other in zip(found, expected))
        assert manager.rows.draft.failure is None
    records = [record for one in found for record in one.stats.records]
    assert sum(sum(record.hits) for record in records) > 3 and {record.mode for record in records} == {AHEAD}
