"""What a speculator answers must not depend on what it had prepared."""

import dataclasses

import pytest
import torch
from hf_ssd.drafting.planner import FixedPlanner
from transformers import GenerationConfig

from hf_ssd import SSDConfig
from hf_ssd.drafting.speculator import SKIPPED, Speculator

from ..conftest import VOCAB, tiny_model

OPTIONS = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 30},
    "sampled with penalty": {"do_sample": True, "top_k": 0, "repetition_penalty": 1.2},
}


def new_speculator(options, asynchronous, rows=3, family="llama", **config):
    prompts = [torch.arange(2, 5 + 3 * row) for row in range(rows)]
    generation_config = GenerationConfig(max_length=200, eos_token_id=1, pad_token_id=0, **options)
    speculator = Speculator(
        tiny_model(family, seed=4), SSDConfig(lookahead=4, budget=12, **config), generation_config, prompts, seed=5
    )
    speculator.prefill()
    if asynchronous:
        speculator.prepare()
    return speculator


def interrupted_after(steps):
    """An outcome that is due after some steps: none of the branches, or some of their tokens, or all are drafted."""
    left = iter(range(steps))
    return lambda: next(left, None) is None


@pytest.mark.parametrize("family", ["llama", "gemma"])
@pytest.mark.parametrize("options", OPTIONS)
@torch.inference_mode()
def test_answers_are_the_same_prepared_or_just_in_time(options, family):
    ahead, in_time = (new_speculator(OPTIONS[options], asynchronous, family=family) for asynchronous in (True, False))
    generator = torch.Generator().manual_seed(6)
    hits = misses = 0
    accepted, bonus = torch.zeros(3, dtype=torch.long), torch.randint(2, VOCAB, (3,), generator=generator)
    for turn in range(12):
        if turn % 2 and turn < 10:  # an outcome that was prepared, in some rows
            index = torch.randint(0, 12, (3,), generator=generator)
            rows = torch.arange(3) != turn % 3
            accepted = torch.where(rows, ahead.prepared.accepted[torch.arange(3), index], accepted)
            bonus = torch.where(rows, ahead.prepared.bonus[torch.arange(3), index], bonus)
        if turn >= 10:
            accepted[1] = SKIPPED
        first, second = ahead.answer(accepted, bonus), in_time.answer(accepted, bonus)
        used = accepted != SKIPPED
        assert torch.equal(first.tokens[used], second.tokens[used])
        if first.probabilities is not None:
            torch.testing.assert_close(first.probabilities[used], second.probabilities[used], atol=1e-5, rtol=1e-4)
        hits, misses = hits + first.hits[used].sum().item(), misses + (~first.hits[used]).sum().item()
        assert not second.hits.any()
        ahead.prepare(interrupted_after(turn % 7))
        accepted = torch.randint(0, 5, (3,), generator=generator)
        bonus = torch.randint(2, VOCAB, (3,), generator=generator)
    assert hits >= 6 and misses >= 6


@pytest.mark.parametrize("steps", range(6))
@torch.inference_mode()
def test_a_branch_that_is_half_grown_is_finished_alone(steps, monkeypatch):
    speculator = new_speculator(OPTIONS["sampled"], asynchronous=False, rows=1, fan_out="uniform")
    expected = new_speculator(OPTIONS["sampled"], asynchronous=False, rows=1)
    speculator.config.asynchronous = True
    speculator.prepare(interrupted_after(steps))
    # The first question is asked before the outcomes are chosen, and changes nothing for a fixed plan.
    assert len(speculator.prepared.tokens) == min(4, max(0, steps - 1))
    fed = []
    forward = speculator.trunk.decoder.forward
    monkeypatch.setattr(
        speculator.trunk.decoder, "forward", lambda t, *a, **k: fed.append(t.shape) or forward(t, *a, **k)
    )
    outcome = (speculator.prepared.accepted[:, 1], speculator.prepared.bonus[:, 1])
    answer = speculator.answer(*outcome)
    assert answer.hits.all() and torch.equal(answer.tokens, expected.answer(*outcome).tokens)
    # What is ready is fed together, and the rest one by one: never more forward passes than tokens are missing.
    assert len(fed) == 4 - min(4, max(0, steps - 1)) and all(shape[0] == 1 for shape in fed)


@torch.inference_mode()
def test_rows_that_hit_keep_their_tokens_when_a_backup_serves_the_others():
    speculator = new_speculator(OPTIONS["sampled"], asynchronous=True, fallback="random", fan_out="uniform")
    in_time = new_speculator(OPTIONS["sampled"], asynchronous=False)
    accepted, bonus = torch.zeros(3, dtype=torch.long), speculator.prepared.bonus[:, 0].clone()
    bonus[1] = next(t for t in range(2, VOCAB) if t not in speculator.prepared.bonus[1])
    answer, expected = speculator.answer(accepted, bonus), in_time.answer(accepted, bonus)
    assert answer.hits.tolist() == [True, False, True]
    assert torch.equal(answer.tokens[[0, 2]], expected.tokens[[0, 2]])
    torch.testing.assert_close(answer.probabilities[[0, 2]], expected.probabilities[[0, 2]], atol=1e-5, rtol=1e-4)
    text = speculator.trunk.ids[1, : speculator.trunk.lengths[1]]
    share = torch.bincount(text, minlength=VOCAB) / len(text)
    torch.testing.assert_close(answer.probabilities[1], share.expand(4, -1))
    speculator.prepare()
    assert (speculator.prepared.accepted[1] == 0).sum() >= 10  # the likely outcome of a random proposal


def steps_taken(speculator, monkeypatch):
    """How often the draft runs for rows that a backup serves, beside a row that is finished."""
    speculator.answer(torch.tensor([0, 0, 0]), torch.tensor([5, 6, 7]))
    speculator.prepare(interrupted_after(2))  # one token of each branch
    assert len(speculator.prepared.tokens) == 1
    fed, forward = [], speculator.trunk.decoder.forward
    monkeypatch.setattr(speculator.trunk.decoder, "forward", lambda *a, **k: fed.append(1) or forward(*a, **k))
    prepared = speculator.prepared.bonus[speculator.prepared.accepted == 0].tolist()
    unprepared = next(token for token in range(2, VOCAB) if token not in prepared)
    outcome = torch.tensor([0, SKIPPED, 0]), torch.tensor([unprepared] * 3)
    answer = speculator.answer(*outcome)
    assert not answer.hits.any() and answer.tokens.shape[1] == 4
    return len(fed)


@pytest.mark.parametrize("options", ["greedy", "sampled"])
@torch.inference_mode()
def test_a_finished_row_makes_no_one_draft(options, monkeypatch):
    for fallback, steps in (("random", 0), ("primary", 4)):
        speculator = new_speculator(OPTIONS[options], asynchronous=True, fallback=fallback, fan_out="uniform")
        assert steps_taken(speculator, monkeypatch) == steps


@torch.inference_mode()
def test_tokens_that_were_left_out_while_the_draft_rested_are_fed_later():
    """Rows of different lengths, some rounds without drafting, and then an answer as if nothing had happened."""
    resting, working = (new_speculator(OPTIONS["greedy"], asynchronous=False) for _ in range(2))
    plan = resting.planner.fixed
    generator = torch.Generator().manual_seed(8)
    for turn in range(12):
        rests = turn % 5 != 4
        resting.planner.fixed = resting.plan = dataclasses.replace(plan, lookahead=0 if rests else 4)
        bonus = torch.randint(2, VOCAB, (3,), generator=generator)
        accepted = torch.zeros(3, dtype=torch.long)
        accepted[turn % 3] = SKIPPED if turn == 7 else 0
        first, second = resting.answer(accepted, bonus), working.answer(accepted, bonus)
        assert first.tokens.shape[1] == (0 if rests else 4)
        used = accepted != SKIPPED
        assert rests or torch.equal(first.tokens[used], second.tokens[used])


@torch.inference_mode()
def test_a_call_that_is_all_rest_feeds_no_prompts():
    """If the draft is asked after all, it feeds them then, and answers as ever."""
    speculator, working = (new_speculator(OPTIONS["greedy"], asynchronous=False) for _ in range(2))
    assert min(speculator.trunk.fed) > 0
    for rounds, fed in ((speculator.longest_call - 1, True), (speculator.longest_call, False)):
        speculator.trunk.fed, speculator.known_logits = [0] * 3, []
        speculator.planner.__class__ = type("Resting", (FixedPlanner,), {"rest": rounds})
        speculator.prefill()
        assert bool(speculator.known_logits) == fed and (min(speculator.trunk.fed) > 0) == fed
    outcome = torch.zeros(3, dtype=torch.long), torch.arange(2, 5)
    assert torch.equal(speculator.answer(*outcome).tokens, working.answer(*outcome).tokens)


@torch.inference_mode()
def test_a_row_answers_as_if_it_were_alone():
    together = new_speculator(OPTIONS["greedy"], True)
    generator = torch.Generator().manual_seed(7)
    alone = [Speculator(
        tiny_model(seed=4), SSDConfig(lookahead=4), GenerationConfig(max_length=200), [torch.arange(2, 5 + 3 * row)], 5
    ) for row in range(3)]  # fmt: skip
    for speculator in alone:
        speculator.prefill()
    for turn in range(6):
        accepted = torch.randint(0, 5, (3,), generator=generator) * (turn > 0)  # the first outcome is a first token
        bonus = torch.randint(2, VOCAB, (3,), generator=generator)
        tokens = together.answer(accepted, bonus).tokens
        together.prepare()
        for row, speculator in enumerate(alone):
            assert torch.equal(tokens[row], speculator.answer(accepted[row : row + 1], bonus[row : row + 1]).tokens[0])


@torch.inference_mode()
def test_noise_that_depends_on_the_branch_is_noticed(monkeypatch):
    """The mutant: draft randomness by how often one drew, not by where."""
    from hf_ssd.drafting import sampling

    def at(self, row, start, depth):
        self.calls = getattr(self, "calls", 0) + 1
        return torch.empty(self.vocab_size).exponential_(generator=torch.Generator().manual_seed(self.calls))

    monkeypatch.setattr(sampling.SpeculationNoise, "at", at)
    with pytest.raises(AssertionError):
        test_answers_are_the_same_prepared_or_just_in_time("sampled", "llama")
