"""Coupled sampling: the text is a function of target, prompt, row and seed, and is distributed as the target's own."""

import threading
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_ssd
from hf_ssd.generation import deciding, loop, verification
from hf_ssd.generation.proposers import ngrams
from hf_ssd.generation.trees import Tree
from hf_ssd.noise import Noise
from hf_ssd.rounds import AHEAD, Plan

from ..helpers.at_length import AtLength
from ..helpers.channels import both
from ..helpers.families import sharp_pair
from ..helpers.mutants import instead_of
from ..helpers.preparing import Whims, preparing
from ..helpers.sampled_strings import SMALL, noise_of_rounds, p_value, power
from ..helpers.suites import quick_first
from ..helpers.tiny import padded_batch, tiny_draft, tiny_model
from .models import FAMILIES, SUPPORTED

COUPLED = {"verification": "coupled"}


def text(target, draft=None, inputs=None, seed=3, options=(), **config):
    """A sampled text of a coupled call, without a draft in single passes of the target."""
    torch.manual_seed(seed)
    config = hf_ssd.SSDConfig(**{"lookahead": 4 * (draft is not None), "budget": 8, **COUPLED, **config})
    options = {"max_new_tokens": 24, "do_sample": True, "top_k": 20, "return_dict_in_generate": True, **dict(options)}
    inputs = padded_batch(2) if inputs is None else inputs
    return target.generate(**inputs, **options, assistant_model=draft, ssd_config=config)


def check_same(target, draft, inputs=None, **config):
    alone = text(target, inputs=inputs)
    assert {*alone.ssd_stats.column("mode")} == {"plain"} and len(alone.ssd_stats.records) == 23
    output = text(target, draft, inputs, **config)
    assert torch.equal(output.sequences, alone.sequences) and output.ssd_stats.draft_failure is None
    return output.ssd_stats


# ---------------------------------------------------------------- the same text, whoever drafts


def test_a_text_is_that_of_single_passes(target, draft):
    with preparing() as hits:
        stats = check_same(target, draft, asynchronous=False)
    assert stats.tokens_per_round > 1.2 and sum(hits) > 0
    assert stats.adjustable == ["lookahead", "budget"]  # Saguaro sampling is refused


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "mixtral", "deepseek_v3", "qwen3_next", "bamba", "lfm2"])
def test_texts_of_a_family_are_those_of_single_passes(name):
    assert FAMILIES[name][0] == SUPPORTED
    with preparing():
        assert check_same(*sharp_pair(name, noise=0.003), asynchronous=False).tokens_per_round > 1.1


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_rows_beside_it(target, draft):
    both = padded_batch(2)
    first = {name: tensor[:1] for name, tensor in both.items()}
    beside = {name: tensor[[0, 1, 1, 1]] for name, tensor in both.items()}
    texts = [text(target, draft, inputs, asynchronous=False).sequences[0] for inputs in (first, both, beside)]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[1], texts[2])
    assert not torch.equal(texts[0], text(target, draft, first, seed=4, asynchronous=False).sequences[0])


RANDOM = given(
    config=st.fixed_dictionaries({
        "lookahead": st.sampled_from([1, 2, 5, "auto"]), "budget": st.sampled_from([1, 9]),
        "fan_out": st.sampled_from(["confidence", "uniform"]), "fallback": st.sampled_from(["ngram", "random", "auto"]),
    }),
    options=st.sampled_from([{}, {"temperature": 0.5}, {"top_p": 0.8}, {"repetition_penalty": 1.3}, {"top_k": 0}]),
    seed=st.integers(0, 2**32), rows=st.integers(1, 4),
    chance=st.randoms(use_true_random=True),  # how often it is asked depends on the clock
)  # fmt: skip


@pytest.mark.parametrize("examples", [10, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_no_setting_and_no_plan_changes_a_text(examples):
    """Of models with one layer, for the time that it takes."""
    target, draft = hf_ssd.enable(tiny_model(num_hidden_layers=1)), tiny_draft(num_hidden_layers=1)
    gained, taken = [], []  # tokens per round, and whether a sibling of a drafted token was accepted

    @settings(max_examples=examples)
    @RANDOM
    def check(config, options, seed, rows, chance):
        def planned(*_):
            source, early = chance.choice(["primary", "ngram"]), chance.choice([0, 9])
            return Plan(AHEAD, 5, chance.randint(0, 5), 6, source, 4, early)

        of_both = padded_batch(rows), seed, {"max_new_tokens": 12, **options}
        with preparing(planned, lambda: chance.random() < 0.2):
            one = text(target, draft, *of_both, asynchronous=False, **config)
        assert torch.equal(one.sequences, text(target, None, *of_both).sequences)
        gained.append(one.ssd_stats.tokens_per_round)
        taken.extend(record.took_sibling(row) for record in one.ssd_stats.records for row in record.live)

    check()
    assert any(taken)
    assert len(gained) >= examples and sum(gained) > 1.3 * len(gained)


def test_a_text_goes_on_when_its_worker_is_killed(target, draft):
    alone = text(target)
    with hf_ssd.launch_draft(draft, num_threads=1) as worker:
        kill = AtLength(15, worker.workers[0].process.popen.kill)
        output = text(target, worker, options={"logits_processor": [kill]})
    stats = output.ssd_stats
    assert stats.draft_failure and {*stats.column("mode")} == {"ahead", "plain"}
    assert torch.equal(output.sequences, alone.sequences)


def check_threads(target, draft, monkeypatch, of_thread):
    """Two calls in threads of their own, at the same time, whose seeds are in `of_thread`."""
    monkeypatch.setattr(loop, "seed_of_call", lambda *_: of_thread.seed)
    together = threading.Barrier(2)

    def run(seed):
        of_thread.seed = seed
        together.wait(timeout=60)
        return text(target, draft, asynchronous=False)

    outputs = both(lambda: run(1), lambda: run(2))
    for seed, output in enumerate(outputs, start=1):
        monkeypatch.setattr(loop, "seed_of_call", lambda *_, seed=seed: seed)
        assert torch.equal(output.sequences, text(target).sequences) and output.ssd_stats.tokens_per_round > 1.2
    assert not torch.equal(*(output.sequences for output in outputs))


def test_threads_give_the_texts_of_their_seeds(target, draft, monkeypatch):
    check_threads(target, draft, monkeypatch, threading.local())


def test_a_seed_that_threads_share_is_noticed(target, draft, monkeypatch):
    """The mutant for the test above: as torch's generator, which the latest thread has set for both."""
    with pytest.raises(AssertionError):
        check_threads(target, draft, monkeypatch, types.SimpleNamespace())


def test_noise_of_rounds_is_noticed(target, draft, monkeypatch):
    noise_of_rounds(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_text_is_that_of_single_passes(target, draft)


# ---------------------------------------------------------------- the distribution


@pytest.fixture
def by_whim(monkeypatch):
    monkeypatch.setattr(ngrams, "LEAST_MATCHED", 2)  # so short texts have no longer matches
    with preparing(Whims().planned, lambda: False) as hits:
        yield hits


def test_sampled_strings_have_the_targets_distribution(small, by_whim):
    assert p_value(*small, calls=8, seed=6, **COUPLED) > 1e-3
    assert 0.1 < sum(by_whim) / len(by_whim) < 0.95


OF_TREES = {"lookahead": 2, "tree_nodes": 6, "calls": 8, "seed": 6, **COUPLED}


@pytest.mark.slow
def test_strings_of_trees_have_it_too(small, monkeypatch):
    verified, verify = [], loop.verify_tree
    monkeypatch.setattr(loop, "verify_tree", lambda *arguments: verified.append(1) or verify(*arguments))
    assert p_value(*small, **OF_TREES) > 1e-3 and len(verified) >= OF_TREES["calls"]


@pytest.mark.slow
def test_nodes_that_see_their_siblings_change_the_distribution(small, monkeypatch):
    ancestors = Tree.ancestors
    monkeypatch.setattr(Tree, "ancestors", lambda tree: np.tril(np.ones_like(ancestors(tree))))
    assert power(*small, at_least=1.0, **OF_TREES) > 0.99


@pytest.mark.slow
def test_strings_that_are_decided_token_by_token_have_it_too(small):
    every = {"prefix_allowed_tokens_fn": lambda row, ids: list(range(SMALL))}
    assert p_value(*small, calls=8, options=every, **COUPLED) > 1e-3


@instead_of(deciding, "verify_coupled")
def every_draft(_, scores, drafted, chance):
    """What the draft draws is taken, as if both models were the same."""
    noise = chance.of_draws(torch.full((len(drafted), 1), drafted.shape[1]))[:, 0]
    none = torch.zeros_like(chance.rows)
    return none + drafted.shape[1], verification.drawn(scores[:, -1].softmax(-1), noise), none


@instead_of(deciding, "verify_coupled")
def residual_draw(verify, scores, drafted, chance):
    """After a mismatch another token than the drafted one is drawn, as if it had been rejected by chance."""
    accepted, bonus, unlikely = verify(scores, drafted, chance)
    p, rows = scores.softmax(-1), torch.arange(len(drafted))
    residual = verification.residual_distribution(p, None, drafted, accepted)
    return accepted, verification.drawn(residual, chance.of_draws(torch.zeros(len(rows), 1).long())[:, 0]), unlikely


@instead_of(Noise, "drawn_at")
def of_one_place(_, self, purpose, row, start, depth):
    return purpose, row, 0 * start, 0 * depth


@pytest.mark.parametrize("mutate", quick_first([every_draft, residual_draw, of_one_place]))
def test_mistakes_change_the_distribution(small, mutate, monkeypatch):
    mutate(monkeypatch)
    assert power(*small, calls=8, seed=6, at_least=1.0, **COUPLED) > 0.99


def test_no_probabilities_are_kept_or_sent(target, draft, monkeypatch):
    read = []
    monkeypatch.setattr("hf_ssd.distributed.wire.read_probabilities", lambda *_: read.append(1))
    with hf_ssd.launch_draft(draft, num_threads=1) as worker:
        stats = check_same(target, worker)
    assert stats.hit_rate > 0 and not read


def test_saguaro_sampling_needs_the_rule_of_rejection():
    with pytest.raises(ValueError, match="coupled"):
        hf_ssd.SSDConfig(saguaro_c=0.5, **COUPLED)
