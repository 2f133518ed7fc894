"""Sampling where drafted tokens have keys that are not finite: the distribution of the tokens is the target's own."""

import copy

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import hf_ssd
from hf_ssd.cache.trial import check_supported
from hf_ssd.generation.deciding import CallRows
from hf_ssd.generation.target import Target

from ..helpers.sampled_strings import PROMPT, ROWS, SMALL, exact_probabilities, p_value, power
from ..helpers.suites import quick_first
from ..helpers.tiny import tiny_draft, tiny_model

UNSOUND = 5


def pair(value=torch.nan, ends=False):
    """
    A target with an embedding that is not finite, the same target with a finite one, and a draft that proposes its
    token. The target never gives the token, or, if texts end with it, as often as others.
    """
    sizes = {"vocab_size": SMALL, "initializer_range": 0.12}
    sound, draft = tiny_model(seed=3, **sizes), tiny_draft(seed=3, disagreement=0.12, **sizes)
    with torch.no_grad():
        draft.lm_head.weight[UNSOUND] = draft.lm_head.weight[:UNSOUND].mean(0)
        if not ends:
            sound.lm_head.bias = torch.nn.Parameter(torch.tensor([0.0] * UNSOUND + [-1e4]))
        target = hf_ssd.enable(copy.deepcopy(sound))
        check_supported(target)  # which feeds every token of so small a vocabulary
        target.get_input_embeddings().weight[UNSOUND] = value
    return target, sound, draft


@pytest.fixture
def fed_again(monkeypatch):
    """Collects, for each pass over rows that are verified alone, how many drafted tokens came before its token."""
    places, original = [], Target.verify_alone

    def noted(self, rows, place):
        places.append(place)
        return original(self, rows, place)

    monkeypatch.setattr(Target, "verify_alone", noted)
    return places


def found(measure, models, calls=8, rows=ROWS, options=None, ends=False, **settings):
    """What is measured of sampled strings of three tokens, with padding after an end."""
    target, sound, draft = models
    options = {"top_k": 0, "temperature": 1.0, "max_new_tokens": 6, **(options or {})}
    options["eos_token_id"] = UNSOUND if ends else None
    exact = exact_probabilities(sound, warpers=(), skipped=0, end=UNSOUND if ends else None)
    return measure(target, draft, calls, at_least=1.05, options=options, exact=exact, rows=rows, skipped=0, **settings)


VALUES = {"NaN": torch.nan, "infinite": torch.inf}
# lookahead, value of the embedding, whether texts end with its token, and calls
CASES = [(1, "NaN", True, 8), (3, "NaN", True, 8), (4, "infinite", True, 8)]
NEVER_GIVEN = [pytest.param(k, value, False, 20, marks=pytest.mark.slow) for k, value in ((2, "infinite"), (4, "NaN"))]


@pytest.mark.slow
@pytest.mark.parametrize("lookahead, value, ends, calls", [*quick_first(CASES, 2), *NEVER_GIVEN])
def test_strings_have_the_targets_distribution(lookahead, value, ends, calls, fed_again):
    assert found(p_value, pair(VALUES[value], ends), lookahead=lookahead, ends=ends, calls=calls) > 1e-3
    assert fed_again.count(0) > 8 and (lookahead == 1 or fed_again.count(lookahead - 1) > 2)


@pytest.fixture(scope="module")
def worker():
    with hf_ssd.launch_draft(pair()[2], num_threads=1) as assistant:
        yield assistant


@pytest.mark.slow
@pytest.mark.parametrize("lookahead, value, ends, calls", [CASES[1], NEVER_GIVEN[0]])
def test_strings_have_the_targets_distribution_with_a_worker(worker, lookahead, value, ends, calls, fed_again):
    models, settings = (*pair(VALUES[value], ends)[:2], worker), {"lookahead": lookahead, "asynchronous": True}
    assert found(p_value, models, ends=ends, calls=calls, **settings) > 1e-3
    assert fed_again.count(0) > 6


MANY = {"lookahead": 2, "ends": True, "calls": 40}


@pytest.mark.slow
def test_many_strings_have_the_targets_distribution():
    assert found(p_value, pair(ends=True), **MANY) > 1e-3


class Unknown(LogitsProcessor):
    """Changes nothing, but may be one that compares rows, so all rows keep the same length."""

    def __call__(self, input_ids, scores):
        return scores


STEPS = {  # rows, and options
    "constraint": (64, {"prefix_allowed_tokens_fn": lambda *_: list(range(SMALL))}),
    "unknown": (4, {"logits_processor": LogitsProcessorList([Unknown()])}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["constraint", pytest.param("unknown", marks=pytest.mark.slow)])
def test_strings_have_the_targets_distribution_by_step(name, fed_again):
    rows, options = STEPS[name]
    settings = {"calls": 1000 // rows, "rows": rows, "options": options, "lookahead": 2, "ends": True}
    assert found(p_value, pair(ends=True), **settings) > 1e-3
    assert fed_again.count(0) > 8 and fed_again.count(1) > 2


def without_the_rule(self, logits, q, drafted, by_step=CallRows.decide_by_step):
    """Draws the next token, as if no token had been drafted."""
    q = q.clone()
    q[logits[..., 0].isnan().any(dim=1)] = 0  # no token is drawn with this probability
    return by_step(self, logits, q, drafted)


@pytest.mark.slow
@pytest.mark.parametrize("lookahead, value, ends, calls", [CASES[1], NEVER_GIVEN[0]])
def test_rows_without_the_rule_are_noticed(lookahead, value, ends, calls, monkeypatch):
    """The mutant: a row that is verified alone draws from p, though its drafted tokens are the reason."""
    monkeypatch.setattr(CallRows, "decide_by_step", without_the_rule)
    assert found(power, pair(VALUES[value], ends), lookahead=lookahead, ends=ends, calls=calls) > 0.99


@pytest.mark.slow
def test_rows_that_stop_at_the_first_token_are_noticed(monkeypatch):
    """The mutant: the rule is applied to the first token alone, so the second depends on whether a later one is bad."""
    monkeypatch.setattr(CallRows, "_sound", lambda *_: [])
    assert found(power, pair(ends=True), **MANY) > 0.99


@pytest.mark.parametrize("options", [{}, *[options for _, options in STEPS.values()]], ids=["all at once", *STEPS])
def test_a_target_that_gives_the_token_raises_as_plain_generation(options):
    """After it there is no distribution to draw from."""
    target, _, draft = pair()
    with torch.no_grad():
        target.lm_head.bias.neg_()
    options = {"input_ids": PROMPT, "do_sample": True, "max_new_tokens": 6, **options}
    config = hf_ssd.SSDConfig(lookahead=2, budget=4, asynchronous=False)
    for speculating in ({}, {"assistant_model": draft, "ssd_config": config}):
        with pytest.raises(RuntimeError, match="probability tensor contains either `inf`, `nan`"):
            target.generate(**options, **speculating)
        assert target.generate(**{**options, "max_new_tokens": 1}, **speculating)[0, -1] == UNSOUND
