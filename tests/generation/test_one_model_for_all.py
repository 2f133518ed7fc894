"""A model that others use during a call: threads, tasks, a second target with the same draft, a processor."""

import contextlib
import functools
import random
import signal
import threading

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import hf_ssd
from hf_ssd.generation.target import Features

from ..helpers.heads import knows, tiny_head
from ..helpers.tiny import padded_batch, tiny_draft, tiny_model

IN_TURN = {"lookahead": 3, "asynchronous": False}
OPTIONS = {"max_new_tokens": 12, "do_sample": False}


def prompt(number: int) -> torch.LongTensor:
    return torch.arange(3 + number % 5, 9 + number % 5)[None]


def run(threads) -> None:
    threads = [threading.Thread(target=thread) for thread in threads]
    [thread.start() for thread in threads]
    [thread.join(300) for thread in threads]
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("calls", [48, pytest.param(1000, marks=pytest.mark.slow)])
def test_threads_that_share_a_target_get_the_tokens_of_plain_decoding(calls, assistant):
    target, draft = hf_ssd.enable(tiny_model()), tiny_draft()
    expected = [target.generate(prompt(number), **OPTIONS) for number in range(5)]
    config, failed, speculated = hf_ssd.SSDConfig(**IN_TURN), [], []
    kinds = {
        "in turn": {"assistant_model": draft, "ssd_config": config},
        "ahead": {"assistant_model": assistant, "ssd_config": hf_ssd.SSDConfig(lookahead=3)},
        "n-grams": {"ssd_config": hf_ssd.SSDConfig(drafter="ngram", lookahead=3)},
        "batch": {"assistant_model": draft, "ssd_config": config},
        "plain": {},
    }

    def calling(kind):
        def call():
            for number in range(calls // len(kinds)):
                try:
                    rows = prompt(number).repeat(2 if kind == "batch" else 1, 1)
                    output = target.generate(rows, **OPTIONS, **kinds[kind], return_dict_in_generate=True)
                    assert all(torch.equal(row[None], expected[number % 5]) for row in output.sequences)
                    if kind != "plain":
                        speculated.append(sum(map(sum, output.ssd_stats.column("accepted"))))
                except Exception as error:
                    failed.append((kind, number, error))

        return call

    run([calling(kind) for kind in kinds])
    assert not failed and len(speculated) == 4 * (calls // 5) and sum(speculated) > calls
    assert target.config._attn_implementation == draft.config._attn_implementation == "sdpa"


def test_two_targets_share_a_draft_in_this_process():
    draft, failed = tiny_draft(), []

    def calling(target):
        def call():
            try:
                for number in range(15):
                    ssd = {"assistant_model": draft, "ssd_config": hf_ssd.SSDConfig(**IN_TURN)}
                    output = target.generate(prompt(number), **OPTIONS, **ssd, return_dict_in_generate=True)
                    assert torch.equal(output.sequences, target.generate(prompt(number), **OPTIONS))
                    assert output.ssd_stats.draft_failure is None and output.ssd_stats.tokens_per_round > 1
            except Exception as error:
                failed.append(error)

        return call

    run([calling(hf_ssd.enable(tiny_model(seed=seed))) for seed in (0, 0)])
    assert not failed


def test_no_config_of_target_or_draft_is_written(monkeypatch):
    """So nothing is to be restored, and another thread never sees a value that is meant for our passes."""
    target, draft = hf_ssd.enable(tiny_model()), tiny_draft()
    kind, own, write = type(target.config), (id(target.config), id(draft.config)), type(target.config).__setattr__

    def guarded(self, name, value):
        assert id(self) not in own, f"{name} of the user's config is written"
        write(self, name, value)

    monkeypatch.setattr(kind, "__setattr__", guarded)
    for _ in range(2):
        ssd = {"assistant_model": draft, "ssd_config": hf_ssd.SSDConfig(**IN_TURN, on_draft_failure="raise")}
        output = target.generate(prompt(0), **OPTIONS, **ssd, return_dict_in_generate=True)
        assert output.ssd_stats.tokens_per_round > 1


class Interrupt(Exception):
    pass


def test_an_interrupt_at_any_moment_leaves_the_model_as_it_was():
    target, draft = hf_ssd.enable(tiny_model()), tiny_draft()
    ssd = {"assistant_model": draft, "ssd_config": hf_ssd.SSDConfig(**IN_TURN)}
    expected = target.generate(prompt(0), **OPTIONS, **ssd)
    parts = [*target.modules(), *draft.modules(), target.config, draft.config]
    before = [dict(vars(part)) for part in parts]

    def interrupt(number, frame):
        raise Interrupt

    chance, interrupted = random.Random(0), 0
    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(40):
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.001, 0.08))
                target.generate(prompt(0), **OPTIONS, **ssd)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                interrupted += 1
            assert [dict(vars(part)) for part in parts] == before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert interrupted > 5
    assert torch.equal(target.generate(prompt(0), **OPTIONS, **ssd), expected)


class Guidance(LogitsProcessor):
    """Changes nothing, but may run the target on tokens of its own, as contrastive methods and judges do."""

    def __init__(self, run=None):
        self.run, self.calls = run, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.run is not None:
            with torch.no_grad():
                self.run()
        return scores


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("tokens, is_call", [(1, False), (6, False), (6, True)])
def test_passes_of_a_processor_are_not_taken_for_those_of_the_call(tokens, is_call, asynchronous, monkeypatch):
    target, rows = hf_ssd.enable(tiny_model()), 2
    head, inputs = tiny_head(target), padded_batch(rows)
    options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **options).sequences
    if not asynchronous:
        texts = zip(plain, inputs["attention_mask"])
        knows(monkeypatch, [text[9 - int(mask.sum()) :].tolist() for text, mask in texts])
    settings = {"lookahead": 3, "asynchronous": asynchronous, "fallback": "primary", "on_draft_failure": "raise"}
    own = torch.arange(2, 2 + tokens).repeat(rows, 1)
    run = functools.partial(target.generate, own, max_new_tokens=3) if is_call else functools.partial(target, own)
    idle, guidance, seen, found, add = Guidance(), Guidance(run), [], [], Features.add
    monkeypatch.setattr(Features, "add", lambda self, states, k: seen.append(self) or add(self, states, k))
    worker = hf_ssd.launch_draft(head, num_threads=1) if asynchronous else contextlib.nullcontext(head)
    with worker as draft:
        for processor in (idle, guidance):
            output = target.generate(
                **inputs,
                **options,
                assistant_model=draft,
                ssd_config=hf_ssd.SSDConfig(**settings),
                logits_processor=LogitsProcessorList([processor]),
            )
            assert torch.equal(output.sequences, plain)
            accepted = [record.accepted for record in output.ssd_stats.records]
            found.append((accepted, seen[-1].values, seen[-1].lengths))
    assert guidance.calls == idle.calls > 5
    # What a head in a worker prepared in time differs from what it drafts after a miss.
    assert asynchronous or (found[0][0] == found[1][0] and output.ssd_stats.tokens_per_round > 1.3)
    for row in range(rows):  # the hidden states at all tokens of the text
        count = min(lengths[row] for _, _, lengths in found)
        assert count > 20
        torch.testing.assert_close(found[1][1][row, :count], found[0][1][row, :count])
