"""Whole calls with a parallel draft: planned, with several drafts, compiled, and sampled as the target samples."""

import pytest
import torch

import hf_ssd
from hf_ssd.drafting.parallel_drafter import ParallelDrafter

from ..helpers.sampled_strings import SMALL, p_value
from ..helpers.tiny import padded_batch, tiny_draft, tiny_model

MASK = 96


@pytest.fixture(scope="module")
def pair():
    target = hf_ssd.enable(tiny_model())
    draft = tiny_draft(pard_token=MASK)
    with hf_ssd.launch_draft(draft, num_threads=1) as assistant:
        yield target, draft, assistant


def generate(target, model, rows, do_sample=False, seed=11, options=None, **settings):
    torch.manual_seed(seed)
    return target.generate(
        **padded_batch(rows),
        max_new_tokens=40,
        do_sample=do_sample,
        **(options or {}),
        assistant_model=model,
        ssd_config=hf_ssd.SSDConfig(**settings),
        return_dict_in_generate=True,
    )


def test_the_planner_drafts_in_parallel(pair):
    target, draft, assistant = pair
    plain = target.generate(**padded_batch(2), max_new_tokens=40, do_sample=False)
    for _ in range(3):
        assert torch.equal(generate(target, assistant, 2).sequences, plain)


@pytest.mark.slow
def test_several_drafts_and_compiled_ones_draft_in_parallel(pair):
    target, draft, _ = pair
    plain = target.generate(**padded_batch(2), max_new_tokens=40, do_sample=False)
    for options in ({"devices": ["cpu", "cpu"], "num_threads": 1}, {"compile": True, "num_threads": 1}):
        with hf_ssd.launch_draft(draft, **options) as assistant:
            output = generate(target, assistant, 2, lookahead=3, budget=6)
            in_turn = generate(target, draft, 2, True, lookahead=3, asynchronous=False)
            sampled = generate(target, assistant, 2, True, lookahead=3, budget=6)
        assert torch.equal(output.sequences, plain) and output.ssd_stats.hit_rate > 0.1
        assert torch.equal(sampled.sequences, in_turn.sequences) and sampled.ssd_stats.hit_rate > 0


# ---------------------------------------------------------------- the distribution


@pytest.fixture(scope="module")
def small():
    sizes = {"vocab_size": SMALL, "initializer_range": 0.12}
    target = hf_ssd.enable(tiny_model(seed=3, **sizes))
    return target, tiny_draft(seed=3, disagreement=0.12, pard_token=SMALL - 1, **sizes)


@pytest.mark.parametrize(
    "settings",
    [{}, {"saguaro_c": 0.3}, {"fallback": "random"}],
    ids=str,
)
@pytest.mark.slow
def test_three_token_strings_have_the_targets_distribution(small, settings, prepared_in_process):
    assert p_value(*small, calls=16, seed=10, **{"budget": 4, **settings}) > 1e-3
    assert 0.1 < sum(prepared_in_process) / len(prepared_in_process) < 0.95


@pytest.mark.slow
def test_three_token_strings_have_the_targets_distribution_with_a_worker(small):
    target, draft = small
    with hf_ssd.launch_draft(draft, num_threads=1) as assistant:
        assert p_value(target, assistant, calls=16, asynchronous=True, seed=1) > 1e-3


@pytest.mark.slow
def test_the_marginals_of_another_branch_fail_the_same_test(small, prepared_in_process, monkeypatch):
    grow = ParallelDrafter.grow

    def mutant(self, *arguments):
        for tokens, probabilities, supports in grow(self, *arguments):
            yield tokens, probabilities.roll(1, dims=1), supports

    monkeypatch.setattr(ParallelDrafter, "grow", mutant)
    assert p_value(*small, calls=16, seed=10, budget=4) < 1e-3
