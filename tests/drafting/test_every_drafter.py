"""What every drafter must pass. A new drafter is a line in `DRAFTERS`."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from transformers import PreTrainedModel

import hf_ssd
from hf_ssd import SSDConfig
from hf_ssd.config import COUPLED
from hf_ssd.drafting.drafter import Completion
from hf_ssd.drafting.drafters import DRAFTERS as KINDS
from hf_ssd.drafting.drafters import drafter_kind
from hf_ssd.drafting.resolver import resolve
from hf_ssd.generation.proposers import ngrams
from hf_ssd.rounds import NGRAM, PLAIN

from ..conformance.test_ngrams_beside_a_draft import competing  # noqa: F401
from ..helpers.assistants import dflash_draft, gemma4_assistant, gemma4_target
from ..helpers.heads import tiny_head, tiny_mtp_head
from ..helpers.preparing import preparing
from ..helpers.sampled_strings import SMALL, SOME_PAIRS, noise_of_rounds, p_value, power
from ..helpers.tiny import tiny_draft, tiny_model

SIZES = {"vocab_size": SMALL, "initializer_range": 0.12}
PARALLEL = {**SIZES, "vocab_size": 8, "pard_token": 7}


@dataclass(frozen=True)
class Case:
    draft: Callable  # takes the target, and how much a draft that is the target with noise differs from it
    settings: dict = field(default_factory=dict)  # of [`SSDConfig`]
    takes_worker: bool = True  # a target's own layer drafts in its process
    prepares: bool = True  # whether the drafter can prepare outcomes
    target: Callable = lambda: tiny_model(seed=3, **SIZES)
    kind: str | None = None  # the drafter's name in hf_ssd, if it differs


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
        if name == "parallel":  # it can be told to draft token by token
            assert drafter_kind(SSDConfig(drafter="autoregressive"), info) is KINDS["autoregressive"]


PADDED = {
    "input_ids": torch.tensor([[0, 0, 2, 3, 1], [3, 1, 2, 2, 4], [0, 0, 0, 0, 5]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1] * 5, [0, 0, 0, 0, 1]]),
}
ENDS = {"repetition_penalty": 1.3, "eos_token_id": [1], "min_new_tokens": 12}
OPTIONS = {"greedy": {}, "a penalty and ends": ENDS}


def greedy(small, case, tree_nodes="auto", **options):
    """Outputs of a call in turn and, if the drafter prepares, of one ahead of time, with the tokens of plain calls."""
    options = {"do_sample": False, "pad_token_id": 0, **options}
    plain = small.generate(**PADDED, **options)
    settings = {"asynchronous": False, "on_draft_failure": "raise", "tree_nodes": tree_nodes, **case[1].settings}
    config = SSDConfig(lookahead=3, budget=8, **settings)
    ours = {"assistant_model": case[1].draft(small, 0.02), "ssd_config": config, "return_dict_in_generate": True}
    outputs = [small.generate(**PADDED, **options, **ours)]
    if case[1].prepares:
        with preparing() as hits:
            outputs.append(small.generate(**PADDED, **options, **ours))
        assert sum(hits) > 0
    assert all(torch.equal(output.sequences, plain) for output in outputs)
    return outputs


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_tokens_are_those_of_plain_generate(small, case, name):
    """In turn, and ahead of time: three rows of different lengths, one of them a single token."""
    outputs = greedy(small, case, max_new_tokens=40, **OPTIONS[name])
    for output in outputs:
        assert output.ssd_stats.tokens_per_round > 1 or case[0] == "parallel"
        assert {r.lookahead for r in output.ssd_stats.records} >= {3}
    assert not any(hit for row in outputs[0].ssd_stats.column("hits") for hit in row)


def test_siblings_of_every_drafter_are_verified(small, case):
    """Also of heads, which read the features of the path that was decided."""
    if case[0] == "dflash":
        pytest.skip("a DFlash draft names no second choices")
    for output in greedy(small, case, tree_nodes=7, max_new_tokens=40):
        records = output.ssd_stats.records
        assert any(r.took_sibling(row) for r in records for row in r.live) and {r.nodes for r in records} >= {7}


@pytest.mark.slow
def test_ngrams_compete_with_every_drafter(small, case, competing):  # noqa: F811
    """In turn, and ahead of time: rows that verify n-grams beside rows that are drafted for."""
    for output in greedy(small, case, max_new_tokens=60):
        records = output.ssd_stats.records
        assert sum(r.accepted[row] for r in records for row in r.live if r.sources[row] == NGRAM) > 0
        assert any({NGRAM} < {r.sources[row] for row in r.live} for r in records)


@pytest.mark.slow
def test_sampled_tokens_with_ngrams_have_the_targets_distribution(small, case, competing, monkeypatch):  # noqa: F811
    monkeypatch.setattr(ngrams, "LEAST_MATCHED", 2)
    with preparing() if case[1].prepares else contextlib.nullcontext() as hits:
        settings = {"budget": 4, "at_least": 1.05, "prompt": SOME_PAIRS, **case[1].settings}
        assert p_value(small, case[2], calls=8, seed=24, **settings) > 1e-3
    assert hits is None or 0.05 < sum(hits) / len(hits) < 0.95


@pytest.mark.slow
@pytest.mark.parametrize("way", ["in turn", "ahead", "with a worker"])
def test_sampled_tokens_have_the_targets_distribution(small, case, way):
    if way == "ahead" and not case[1].prepares or way == "with a worker" and not case[1].takes_worker:
        pytest.skip("prepares nothing, or drafts in the target's process")
    settings = {"at_least": 1.1, **case[1].settings}
    if way == "in turn":
        assert p_value(small, case[2], calls=8, seed=21, **settings) > 1e-3
    elif way == "ahead":
        with preparing() as hits:
            assert p_value(small, case[2], calls=8, seed=22, budget=4, **settings) > 1e-3
        assert 0.1 < sum(hits) / len(hits) < 0.95
    else:
        with hf_ssd.launch_draft(case[2], num_threads=1) as assistant:
            assert p_value(small, assistant, calls=8, seed=23, asynchronous=True, **settings) > 1e-3


def coupled(small, draft, **settings):
    """A coupled call, without a draft in single passes."""
    torch.manual_seed(7)
    settings = {"lookahead": 3 * (draft is not None), "verification": COUPLED, "asynchronous": False, **settings}
    options = {"max_new_tokens": 40, "do_sample": True, "pad_token_id": 0, "return_dict_in_generate": True}
    return small.generate(**PADDED, **options, assistant_model=draft, ssd_config=settings)


def check_coupled(small, case):
    """In turn and, if the drafter prepares, ahead of time."""
    alone = coupled(small, None)
    assert {*alone.ssd_stats.column("mode")} == {PLAIN}
    settings = {"budget": 8, "on_draft_failure": "raise", **case[1].settings}
    outputs = [coupled(small, case[2], **settings)]
    if case[1].prepares:
        with preparing() as hits:
            outputs.append(coupled(small, case[2], **settings))
        assert sum(hits) > 0
    for output in outputs:
        assert torch.equal(output.sequences, alone.sequences) and output.ssd_stats.tokens_per_round > 1.1


def test_coupled_texts_are_those_of_single_passes(small, case):
    check_coupled(small, case)


@pytest.mark.slow
def test_noise_of_rounds_is_noticed(monkeypatch):
    case = DRAFTERS["autoregressive"]
    target = hf_ssd.enable(case.target())
    noise_of_rounds(monkeypatch)
    with pytest.raises(AssertionError):
        check_coupled(target, ("autoregressive", case, case.draft(target, 0.12)))


@pytest.mark.slow
def test_q_of_another_vocabulary_is_noticed(small, case, monkeypatch):
    """The mutant: as if the draft had told its distribution in another vocabulary."""
    speculation = Completion.speculation

    def told(self):
        result = speculation(self)
        result.probabilities = result.probabilities.roll(1, dims=-1)
        return result

    monkeypatch.setattr(Completion, "speculation", told)
    assert power(small, case[2], calls=8, seed=21, at_least=1.0, **case[1].settings) > 0.99
