"""Greedy calls at the ends of what a draft can do, and the mistakes that equality with plain generate() notices."""

import pytest

import hf_ssd
from hf_ssd.cache.branches import Branches
from hf_ssd.generation.verification import verify_greedy

from ..helpers.comparing import as_plain, generate
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
    as_plain(target, draft, padded_batch(4))
    monkeypatch.setattr("hf_ssd.generation.deciding.verify_greedy", mutant)
    with pytest.raises(AssertionError):
        as_plain(target, draft, padded_batch(4))


def test_the_target_as_its_own_draft_hits_every_time():
    target, lookahead, rounds = hf_ssd.enable(tiny_model()), 7, 5
    of_config = {"lookahead": lookahead, "budget": 2 * (lookahead + 1), "fan_out": "uniform"}
    with hf_ssd.launch_draft(target) as assistant:
        options = {"max_new_tokens": 1 + rounds * (lookahead + 1)}
        stats = generate(target, assistant, padded_batch(2), of_config, **options).ssd_stats
    assert stats.hit_rate == 1.0 and stats.acceptance_rate == 1.0
    assert stats.tokens_per_round == lookahead + 1 and stats.rounds == rounds


def test_branches_that_see_each_other_are_noticed(monkeypatch):
    """The mutant for the test above, in this process."""
    grow = Branches.grow

    def leaky(self, *arguments):
        self.mask[..., self.base :] = 0
        return grow(self, *arguments)

    def acceptance_rate():
        of_config = {"budget": 10, "fan_out": "uniform"}
        with preparing() as hits:
            output = generate(hf_ssd.enable(tiny_model()), tiny_model(), padded_batch(2), of_config)
        assert any(hits)
        return output.ssd_stats.acceptance_rate

    assert acceptance_rate() == 1.0
    monkeypatch.setattr(Branches, "grow", leaky)
    assert acceptance_rate() < 1.0
