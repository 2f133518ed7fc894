"""A model that others use during a call: threads, a second target with the same draft, an interrupt."""

import random
import signal
import threading

import pytest
import torch

import hf_ssd

from ..helpers.tiny import tiny_draft, tiny_model

IN_TURN = {"lookahead": 3, "asynchronous": False}
OPTIONS = {"max_new_tokens": 12, "do_sample": False}


def prompt(number: int) -> torch.LongTensor:
    return torch.arange(3 + number % 5, 9 + number % 5)[None]


@pytest.mark.parametrize("calls", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_threads_that_share_models_get_the_tokens_of_plain_decoding(calls, assistant):
    """One target in five ways, and another one with the same draft."""
    (target, other), draft, failed, speculated = (hf_ssd.enable(tiny_model()) for _ in range(2)), tiny_draft(), [], []
    expected = [target.generate(prompt(number), **OPTIONS) for number in range(5)]
    in_turn = {"assistant_model": draft, "ssd_config": hf_ssd.SSDConfig(**IN_TURN)}
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
