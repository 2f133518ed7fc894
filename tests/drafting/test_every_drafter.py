"""What every drafter must pass. A new drafter is a line in `DRAFTERS`."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from transformers import PreTrainedModel

import hf_ssd
from hf_ssd import SSDConfig
from hf_ssd.drafting.drafter import Completion
from hf_ssd.drafting.drafters import DRAFTERS as KINDS
from hf_ssd.drafting.drafters import drafter_kind
from hf_ssd.drafting.resolver import resolve
from hf_ssd.generation.proposers import ngrams
from hf_ssd.rounds import NGRAM

from ..conformance.test_ngrams_beside_a_draft import competing  # noqa: F401
from ..helpers.assistants import dflash_draft, gemma4_assistant, gemma4_target
from ..helpers.heads import tiny_head, tiny_mtp_head
from ..helpers.preparing import preparing
from ..helpers.sampled_strings import SMALL, SOME_PAIRS, p_value
from ..helpers.tiny import tiny_draft, tiny_model

SIZES = {"vocab_size": SMALL, "initializer_range": 0.12}
PARALLEL = {**SIZES, "vocab_size": 8, "pard_token": 7}


@dataclass(frozen=True)
class Case:
    """
    Args:
        draft (`Callable`): Takes the target, and how much a draft that is the target with noise differs from it.
            Returns the draft.
        settings (`dict`): Of [`SSDConfig`].
        tokens_per_round (`float`): That the drafter gains at least, sampled.
        takes_worker (`bool`): Whether a worker can draft. A target's own layer drafts in its process.
        prepares (`bool`): Whether the drafter can prepare outcomes.
        target (`Callable`): Returns the target.
        kind (`str`, *optional*): The drafter's name in hf_ssd, if it differs.
    """

    draft: Callable
    settings: dict = field(default_factory=dict)
    tokens_per_round: float = 1.1
    takes_worker: bool = True
    prepares: bool = True
    target: Callable = lambda: tiny_model(seed=3, **SIZES)
    kind: str | None = None


DRAFTERS = {
    "autoregressive": Case(lambda target, noise: tiny_draft(seed=3, disagreement=noise, **SIZES)),
    "parallel": Case(lambda target, noise: tiny_draft(seed=3, disagreement=noise, **PARALLEL)),
    "eagle3": Case(lambda target, noise: tiny_head(target, draft_vocab=SMALL - 1, initializer_range=0.12)),
    "mtp": Case(lambda target, noise: tiny_mtp_head(target), takes_worker=False),
    "gemma4": Case(
        lambda target, noise: resolve(gemma4_assistant(target, std=0.1), target, SSDConfig()).model,
        takes_worker=False,
        target=lambda: gemma4_target(vocab_size=SMALL, vocab_size_per_layer_input=SMALL, std=0.15),
        kind="eagle3",
    ),
    "dflash": Case(
        lambda target, noise: resolve(dflash_draft(target), target, SSDConfig()).model,
        takes_worker=False,
        prepares=False,
    ),
}


SLOW = ("gemma4", "dflash")  # with quick tests of their own


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in DRAFTERS]
)
def small(request) -> PreTrainedModel:
    """The target."""
    target = hf_ssd.enable(DRAFTERS[request.param].target())
    target.of_case = request.param
    return target


@pytest.fixture(scope="module")
def case(small):
    return small.of_case, DRAFTERS[small.of_case], DRAFTERS[small.of_case].draft(small, 0.12)


def test_the_list_is_complete():
    assert set(KINDS) <= set(DRAFTERS)
    for name, case in DRAFTERS.items():
        target = case.target()
        info = resolve(case.draft(target, 0.0), target, SSDConfig()).info
        assert drafter_kind(SSDConfig(**case.settings), info) is KINDS[case.kind or name]


PADDED = {
    "input_ids": torch.tensor([[0, 0, 2, 3, 1], [3, 1, 2, 2, 4], [0, 0, 0, 0, 5]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1] * 5, [0, 0, 0, 0, 1]]),
}
OPTIONS = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.3},
    "end": {"eos_token_id": [1], "min_new_tokens": 6},
}


def generated(small, case, options) -> tuple[list, list]:
    """Returns the output of a call in turn, and if the drafter can prepare, of a call ahead of time with its hits."""
    outputs = [small.generate(**PADDED, **options)]
    with preparing() as hits:
        outputs += [small.generate(**PADDED, **options)] if case[1].prepares else []
    return outputs, hits


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_tokens_are_those_of_plain_generate(small, case, name):
    """In turn, and ahead of time: three rows of different lengths, one of them a single token."""
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **OPTIONS[name]}
    plain = small.generate(**PADDED, **options)
    config = SSDConfig(lookahead=3, budget=8, asynchronous=False, on_draft_failure="raise", **case[1].settings)
    ours = {
        **options,
        "assistant_model": case[1].draft(small, 0.02),
        "ssd_config": config,
        "return_dict_in_generate": True,
    }
    outputs, hits = generated(small, case, ours)
    for output in outputs:
        assert torch.equal(output.sequences, plain)
        assert output.ssd_stats.tokens_per_round > 1 or case[0] == "parallel"
        assert {r.lookahead for r in output.ssd_stats.records} >= {3}
    assert not any(hit for row in outputs[0].ssd_stats.column("hits") for hit in row)
    assert sum(hits) or not case[1].prepares


@pytest.mark.slow
def test_ngrams_compete_with_every_drafter(small, case, competing):  # noqa: F811
    """In turn, and ahead of time: rows that verify n-grams beside rows that are drafted for."""
    options = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    plain = small.generate(**PADDED, **options)
    config = SSDConfig(lookahead=3, budget=8, asynchronous=False, on_draft_failure="raise", **case[1].settings)
    ours = {"assistant_model": case[1].draft(small, 0.02), "ssd_config": config, "return_dict_in_generate": True}
    outputs, hits = generated(small, case, {**options, **ours})
    for output in outputs:
        assert torch.equal(output.sequences, plain)
        records = output.ssd_stats.records
        assert sum(r.accepted[row] for r in records for row in r.live if r.sources[row] == NGRAM) > 0
        assert any({NGRAM} < {r.sources[row] for row in r.live} for r in records)
    assert sum(hits) or not case[1].prepares


@pytest.mark.slow
def test_sampled_tokens_with_ngrams_have_the_targets_distribution(small, case, competing, monkeypatch):  # noqa: F811
    monkeypatch.setattr(ngrams, "LEAST_MATCHED", 2)
    with preparing() if case[1].prepares else contextlib.nullcontext() as hits:
        settings = {"budget": 4, "at_least": 1.05, "prompt": SOME_PAIRS, **case[1].settings}
        assert p_value(small, case[2], calls=8, seed=24, **settings) > 1e-3
    assert hits is None or 0.05 < sum(hits) / len(hits) < 0.95


@pytest.mark.slow
def test_sampled_tokens_have_the_targets_distribution(small, case):
    assert p_value(small, case[2], calls=8, seed=21, at_least=case[1].tokens_per_round, **case[1].settings) > 1e-3


@pytest.mark.slow
def test_sampled_tokens_have_the_targets_distribution_ahead_of_time(small, case):
    if not case[1].prepares:
        pytest.skip("prepares nothing")
    with preparing() as hits:
        settings = {"budget": 4, "at_least": case[1].tokens_per_round, **case[1].settings}
        assert p_value(small, case[2], calls=8, seed=22, **settings) > 1e-3
    assert 0.1 < sum(hits) / len(hits) < 0.95


@pytest.mark.slow
def test_sampled_tokens_have_the_targets_distribution_with_a_worker(small, case):
    if not case[1].takes_worker:
        pytest.skip("drafts in the target's process")
    with hf_ssd.launch_draft(case[2], num_threads=1) as assistant:
        settings = {"asynchronous": True, "at_least": case[1].tokens_per_round, **case[1].settings}
        assert p_value(small, assistant, calls=8, seed=23, **settings) > 1e-3


def q_of_other_tokens(monkeypatch):
    """As if the draft had told its distribution in another vocabulary."""
    speculation = Completion.speculation

    def told(self):
        result = speculation(self)
        result.probabilities = result.probabilities.roll(1, dims=-1)
        return result

    monkeypatch.setattr(Completion, "speculation", told)


@pytest.mark.slow
def test_q_of_another_vocabulary_is_noticed(small, case, monkeypatch):
    q_of_other_tokens(monkeypatch)
    assert p_value(small, case[2], calls=8, seed=21, at_least=1.0, **case[1].settings) < 1e-3
