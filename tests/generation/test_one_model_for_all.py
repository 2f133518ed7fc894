"""A model that others use during a call: threads, tasks, a target with the same draft, an interrupt, a processor."""

import contextlib
import functools
import random
import signal
import threading
import time

import pytest
import torch

import hf_ssd
from hf_ssd.generation import target as of_calls
from hf_ssd.generation.target import Features
from hf_ssd.rounds import AHEAD, IN_TURN

from ..helpers import comparing
from ..helpers.heads import expected_features, knows, tiny_head
from ..helpers.tiny import padded_batch, tiny_draft, tiny_model

SETTINGS = {"lookahead": 3, "asynchronous": False}
OPTIONS = {"max_new_tokens": 12, "do_sample": False}


def prompt(number: int) -> torch.LongTensor:
    return torch.arange(3 + number % 5, 9 + number % 5)[None]


@pytest.mark.parametrize("calls", [36, pytest.param(1000, marks=pytest.mark.slow)])
def test_threads_that_share_models_get_the_tokens_of_plain_decoding(calls, assistant):
    """One target in five ways, and another one with the same draft."""
    (target, other), draft, failed, speculated = (hf_ssd.enable(tiny_model()) for _ in range(2)), tiny_draft(), [], []
    expected = [target.generate(prompt(number), **OPTIONS) for number in range(5)]
    in_turn = {"assistant_model": draft, "ssd_config": hf_ssd.SSDConfig(**SETTINGS)}
    kinds = {
        "in turn": in_turn,
        "ahead": {"assistant_model": assistant, "ssd_config": hf_ssd.SSDConfig(lookahead=3)},
        "n-grams": {"ssd_config": hf_ssd.SSDConfig(drafter="ngram", lookahead=3)},
        "batch": in_turn,
        "another target": in_turn,
        "plain": {},
    }

    def call(kind):
        generate = (other if kind == "another target" else target).generate
        for number in range(calls // len(kinds)):
            try:
                rows = prompt(number).repeat(2 if kind == "batch" else 1, 1)
                output = generate(rows, **OPTIONS, **kinds[kind], return_dict_in_generate=True)
                assert all(torch.equal(row[None], expected[number % 5]) for row in output.sequences)
                if kind != "plain":
                    assert output.ssd_stats.draft_failure is None
                    speculated.append(sum(map(sum, output.ssd_stats.column("accepted"))))
            except Exception as error:
                failed.append((kind, number, error))

    threads = [threading.Thread(target=call, args=[kind]) for kind in kinds]
    [thread.start() for thread in threads]
    [thread.join(300) for thread in threads]
    assert not any(thread.is_alive() for thread in threads)
    assert not failed and len(speculated) == 5 * (calls // 6) and sum(speculated) > calls
    assert target.config._attn_implementation == draft.config._attn_implementation == "sdpa"


def test_no_config_of_target_or_draft_is_written(monkeypatch):
    """So nothing is to be restored, and another thread never sees a value that is meant for our passes."""
    target, draft = hf_ssd.enable(tiny_model()), tiny_draft()
    own, write = (id(target.config), id(draft.config)), type(target.config).__setattr__

    def guarded(self, name, value):
        assert id(self) not in own, f"{name} of the user's config is written"
        write(self, name, value)

    monkeypatch.setattr(type(target.config), "__setattr__", guarded)
    for _ in range(2):
        output = comparing.generate(target, draft, {"input_ids": prompt(0)})
        assert output.ssd_stats.tokens_per_round > 1


class Interrupt(Exception):
    pass


def test_an_interrupt_at_any_moment_leaves_the_model_as_it_was():
    target, draft = hf_ssd.enable(tiny_model()), tiny_draft()
    ssd = {"assistant_model": draft, "ssd_config": hf_ssd.SSDConfig(**SETTINGS)}
    target.generate(prompt(0), **OPTIONS, **ssd)  # the first call takes longer
    start = time.perf_counter()
    expected = target.generate(prompt(0), **OPTIONS, **ssd)
    seconds = time.perf_counter() - start
    parts = [*target.modules(), *draft.modules(), target.config, draft.config]
    before = [dict(vars(part)) for part in parts]

    def interrupt(number, frame):
        raise Interrupt

    chance, interrupted = random.Random(0), 0
    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(200):  # an interrupt of the draft ends the draft and not the call
            if interrupted == 8:
                break
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.05, 1) * seconds)
                target.generate(prompt(0), **OPTIONS, **ssd)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                interrupted += 1
            assert [dict(vars(part)) for part in parts] == before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert interrupted == 8
    assert torch.equal(target.generate(prompt(0), **OPTIONS, **ssd), expected)


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("tokens, is_call", [(1, False), (6, False), (6, True)])
def test_passes_of_a_processor_are_not_taken_for_those_of_the_call(tokens, is_call, rows, asynchronous, monkeypatch):
    """The processor changes nothing, but runs the target on tokens of its own, as contrastive methods and judges do."""
    target, seen, add = hf_ssd.enable(tiny_model()), [], Features.add
    head, inputs, own = tiny_head(target), padded_batch(rows), torch.arange(2, 2 + tokens).repeat(rows, 1)
    plain = target.generate(**inputs, **comparing.GREEDY).sequences
    kept = torch.nn.functional.pad(inputs["attention_mask"], (0, 30), value=1).bool()
    texts = [row[mask] for row, mask in zip(plain, kept)]
    if not asynchronous:
        knows(monkeypatch, [text.tolist() for text in texts])
    run = functools.partial(target.generate, own, max_new_tokens=3) if is_call else functools.partial(target, own)
    monkeypatch.setattr(Features, "add", lambda self, states, k: seen.append(self) or add(self, states, k))
    with hf_ssd.launch_draft(head, num_threads=1) if asynchronous else contextlib.nullcontext(head) as draft:
        processor = [lambda ids, scores: (scores, run())[0]]
        output = comparing.generate(target, draft, inputs, {"on_draft_failure": "raise"}, logits_processor=processor)
    stats = output.ssd_stats
    assert torch.equal(output.sequences, plain) and {*stats.column("mode")} == {AHEAD if asynchronous else IN_TURN}
    assert asynchronous or stats.tokens_per_round > 1.3
    for states, text, length in zip(seen[-1].values, texts, seen[-1].lengths):
        assert length > len(text) - 9
        torch.testing.assert_close(states[:length], expected_features(target, text)[:length], atol=1e-4, rtol=1e-4)


def test_states_that_are_captured_in_all_passes_are_noticed(monkeypatch):
    """The mutant: hooks are those of the user's modules, so passes of a processor are captured too."""
    view = of_calls.view_for_passes
    monkeypatch.setattr(of_calls, "view_for_passes", lambda model, hooked, packed: view(model, (), packed))
    with pytest.raises((AssertionError, hf_ssd.DraftError)):
        test_passes_of_a_processor_are_not_taken_for_those_of_the_call(6, False, 2, False, monkeypatch)
