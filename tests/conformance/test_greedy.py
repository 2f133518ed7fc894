"""Greedy calls at the ends of what a draft can do, and the mistakes that equality with plain generate() notices."""

import random

import numpy as np
import pytest
import torch

import hf_ssd
from hf_ssd.cache.branches import Branches
from hf_ssd.generation.verification import verify_greedy

from ..helpers.preparing import preparing
from ..helpers.tiny import padded_batch, tiny_model


def accepts_one_too_many(scores, drafted):
    accepted, bonus = verify_greedy(scores, drafted)
    return (accepted + 1).clamp(max=drafted.shape[1]), bonus


def takes_the_bonus_token_one_place_early(scores, drafted):
    accepted, _ = verify_greedy(scores, drafted)
    return accepted, scores.argmax(-1).gather(1, (accepted - 1).clamp(min=0)[:, None]).squeeze(1)


@pytest.mark.parametrize("mutant", [accepts_one_too_many, takes_the_bonus_token_one_place_early])
def test_mistakes_in_verification_are_noticed(target, draft, monkeypatch, mutant):
    """The mutants for the greedy calls of `tests/test_matrix.py`."""
    inputs = padded_batch(4)
    options = {"max_new_tokens": 40, "do_sample": False}
    plain = target.generate(**inputs, **options)
    config = hf_ssd.SSDConfig(lookahead=4, asynchronous=False)
    assert torch.equal(target.generate(**inputs, **options, assistant_model=draft, ssd_config=config), plain)
    monkeypatch.setattr("hf_ssd.generation.deciding.verify_greedy", mutant)
    assert not torch.equal(target.generate(**inputs, **options, assistant_model=draft, ssd_config=config), plain)


def test_the_target_as_its_own_draft_hits_every_time():
    target, lookahead, rounds = hf_ssd.enable(tiny_model()), 7, 5
    config = hf_ssd.SSDConfig(lookahead=lookahead, budget=2 * (lookahead + 1), fan_out="uniform")
    with hf_ssd.launch_draft(target) as assistant:
        output = target.generate(
            **padded_batch(2),
            max_new_tokens=1 + rounds * (lookahead + 1),
            do_sample=False,
            assistant_model=assistant,
            ssd_config=config,
            return_dict_in_generate=True,
        )
    stats = output.ssd_stats
    assert stats.hit_rate == 1.0 and stats.acceptance_rate == 1.0
    assert stats.tokens_per_round == lookahead + 1 and stats.rounds == rounds


def test_branches_that_see_each_other_are_noticed(monkeypatch):
    """The mutant for the test above, in this process."""
    grow = Branches.grow

    def leaky(self, *arguments):
        self.mask[..., self.base :] = 0
        return grow(self, *arguments)

    def acceptance_rate():
        config = hf_ssd.SSDConfig(lookahead=4, budget=10, fan_out="uniform", asynchronous=False)
        options = {"assistant_model": tiny_model(), "ssd_config": config, "return_dict_in_generate": True}
        with preparing() as hits:
            output = hf_ssd.enable(tiny_model()).generate(
                **padded_batch(2), max_new_tokens=31, do_sample=False, **options
            )
        assert any(hits)
        return output.ssd_stats.acceptance_rate

    assert acceptance_rate() == 1.0
    monkeypatch.setattr(Branches, "grow", leaky)
    assert acceptance_rate() < 1.0


def test_prompts_longer_than_the_first_allocation(target, assistant):
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(2, 97, (1, 300), generator=generator)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 60, "do_sample": False}
    plain = target.generate(prompt, **options)
    config = hf_ssd.SSDConfig(lookahead=4)
    assert torch.equal(target.generate(prompt, **options, assistant_model=assistant, ssd_config=config), plain)


def random_states():
    python, (kind, numbers, *rest) = random.getstate(), np.random.get_state()
    return python, torch.get_rng_state().tolist(), (kind, numbers.tolist(), *rest)


@pytest.mark.parametrize("settings", [{}, {"fallback": "random", "lookahead": 3}])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_greedy_calls_leave_the_random_numbers_alone_as_plain_ones_do(target, draft, assistant, asynchronous, settings):
    config = hf_ssd.SSDConfig(asynchronous=asynchronous, **settings)
    model = assistant if asynchronous else draft
    options = {"max_new_tokens": 20, "assistant_model": model, "ssd_config": config}
    before = random_states()
    target.generate(**padded_batch(2), do_sample=False, **options)
    assert random_states() == before
    target.generate(**padded_batch(2), do_sample=True, **options)  # which draws from torch's generator
    after = random_states()
    assert after[1] != before[1] and (after[0], after[2]) == (before[0], before[2])
