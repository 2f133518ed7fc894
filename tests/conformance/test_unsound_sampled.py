"""Sampling where drafted tokens have keys that are not finite: the distribution of the tokens is the target's own."""

import copy

import pytest
import torch

import hf_ssd
from hf_ssd.cache.trial import check_supported
from hf_ssd.generation.deciding import CallRows
from hf_ssd.generation.target import Target

from ..helpers.mutants import instead_of
from ..helpers.sampled_strings import PROMPT, ROWS, SMALL, exact_probabilities, p_value, power
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
    places, verify = [], Target.verify_alone
    monkeypatch.setattr(Target, "verify_alone", lambda *arguments: places.append(arguments[-1]) or verify(*arguments))
    return places


def found(measure, models, calls=8, rows=ROWS, options=None, ends=False, **settings):
    """What is measured of sampled strings of three tokens, with padding after an end."""
    target, sound, draft = models
    end = UNSOUND if ends else None
    options = {"top_k": 0, "temperature": 1.0, "max_new_tokens": 6, "eos_token_id": end, **(options or {})}
    exact = exact_probabilities(sound, warpers=(), skipped=0, end=end)
    return measure(target, draft, calls, at_least=1.05, options=options, exact=exact, rows=rows, skipped=0, **settings)


# lookahead, value of the embedding, whether texts end with its token, and calls
TWO_CASES, MANY_CALLS = [(3, torch.nan, True, 8), (2, torch.inf, False, 20)], (2, torch.nan, True, 40)
CASES = [(1, torch.nan, True, 8), (4, torch.inf, True, 8), (4, torch.nan, False, 20), *TWO_CASES, MANY_CALLS]


@pytest.mark.slow
@pytest.mark.parametrize("lookahead, value, ends, calls", CASES)
def test_strings_have_the_targets_distribution(lookahead, value, ends, calls, fed_again):
    assert found(p_value, pair(value, ends), lookahead=lookahead, ends=ends, calls=calls) > 1e-3
    assert fed_again.count(0) > 8 and (lookahead == 1 or fed_again.count(lookahead - 1) > 2)


@pytest.fixture(scope="module")
def worker():
    with hf_ssd.launch_draft(pair()[2], num_threads=1) as assistant:
        yield assistant


@pytest.mark.slow
@pytest.mark.parametrize("lookahead, value, ends, calls", TWO_CASES)
def test_strings_have_the_targets_distribution_with_a_worker(worker, lookahead, value, ends, calls, fed_again):
    models, settings = (*pair(value, ends)[:2], worker), {"lookahead": lookahead, "asynchronous": True}
    assert found(p_value, models, ends=ends, calls=calls, **settings) > 1e-3
    assert fed_again.count(0) > 6


STEPS = {  # rows, and options; the processor may be one that compares rows, so all rows keep the same length
    "constraint": (64, {"prefix_allowed_tokens_fn": lambda *_: list(range(SMALL))}),
    "unknown": (4, {"logits_processor": [lambda ids, scores: scores]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("rows, options", STEPS.values(), ids=STEPS)
def test_strings_have_the_targets_distribution_by_step(rows, options, fed_again):
    settings = {"calls": 1000 // rows, "rows": rows, "options": options, "lookahead": 2, "ends": True}
    assert found(p_value, pair(ends=True), **settings) > 1e-3
    assert fed_again.count(0) > 8 and fed_again.count(1) > 2


@instead_of(CallRows, "decide_by_step")
def without_the_rule(by_step, self, logits, q, drafted):
    """A row that is verified alone draws from p, as if no token had been drafted, though these are the reason."""
    q = q.clone()
    q[logits[..., 0].isnan().any(dim=1)] = 0  # no token is drawn with this probability
    return by_step(self, logits, q, drafted)


@instead_of(CallRows, "_sound")
def only_the_first_token(*_):
    """The rule is applied to the first token alone, so the second depends on whether a later one is bad."""
    return []


MUTANTS = [*((without_the_rule, *case) for case in TWO_CASES), (only_the_first_token, *MANY_CALLS)]


@pytest.mark.slow
@pytest.mark.parametrize("mutate, lookahead, value, ends, calls", MUTANTS)
def test_rows_without_the_rule_are_noticed(mutate, lookahead, value, ends, calls, monkeypatch):
    mutate(monkeypatch)
    assert found(power, pair(value, ends), lookahead=lookahead, ends=ends, calls=calls) > 0.99


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
