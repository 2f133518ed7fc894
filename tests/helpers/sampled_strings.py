"""Sampled strings of three tokens, of a vocabulary so small that each string has an exact probability."""

import math

import torch
from scipy import stats
from torch.nn.functional import pad
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper

import hf_ssd
from hf_ssd.noise import Noise

SMALL, ROWS = 6, 256  # tokens of the vocabulary, and rows of each call
PROMPT = torch.tensor([[2, 3, 4]])
WARPERS = {"temperature": 0.8, "top_k": 4}
DIGITS = torch.tensor([SMALL**2, SMALL, 1])  # of a string's number

SOME_PAIRS = torch.tensor([[2, 3, 4, 2, 0, 3, 3, 5, 4, 4, 2, 3, 4]])  # a prompt after which some rows have a match


def every_pair():
    """A prompt in which each pair of tokens has occurred, so that every row has a match in every round."""
    steps = [(a + step) % SMALL for step in range(SMALL) for a in range(SMALL)]
    text, pairs = [0], set()
    while len(pairs) < SMALL**2:  # from the latest token to the largest one that has not followed it
        free = [b for b in range(SMALL) if (text[-1], b) not in pairs]
        text.append(max(free) if free else (steps.pop() + 1) % SMALL)
        pairs.add((text[-2], text[-1]))
    return torch.tensor([text])


@torch.inference_mode()
def exact_probabilities(target, prompt=PROMPT, warpers=None, skipped=1, end=None):
    """
    Of three tokens, behind one from the prefill that is summed over, unless none is skipped. With an end, padding
    follows it.
    """
    warpers = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(4)] if warpers is None else warpers
    joint, prefixes = torch.ones(1), prompt
    for _ in range(3 + skipped):
        p = LogitsProcessorList(warpers)(prefixes, target(prefixes).logits[:, -1]).softmax(-1)
        if end is not None:
            p[(prefixes[:, prompt.shape[1] :] == end).any(dim=1)] = torch.eye(SMALL)[0]
        joint = (joint[:, None] * p).flatten()
        tokens = torch.arange(SMALL).repeat(len(prefixes))[:, None]  # each prefix with each token after it
        prefixes = torch.cat([prefixes.repeat_interleave(SMALL, 0), tokens], dim=1)
    return joint.view(SMALL**skipped, -1).sum(0).double()


def p_value(*pair, **settings):
    """Of the chi-square test of the strings of [`counts_of`]."""
    return chi_square(*counts_of(*pair, **settings))


def power(*pair, **settings):
    """Of the same test for the distribution of a mutant: see [`power_of`]."""
    return power_of(*counts_of(*pair, **settings))


def counts_of(
    target, draft, calls=24, seed=0, at_least=1.1, options=(), prompt=PROMPT, exact=None, rows=ROWS, skipped=1, **config
):
    """
    Of sampled three-token strings, and their exact probabilities, which are those of `target` behind the first token by
    default.
    """
    counts, speculated, ids = torch.zeros(SMALL**3), 0.0, prompt.repeat(rows, 1)
    torch.manual_seed(seed)
    config = hf_ssd.SSDConfig(**{"lookahead": 3, "budget": 8, "asynchronous": False, **config})
    options = {"max_new_tokens": 5, "do_sample": True, **WARPERS, "return_dict_in_generate": True, **dict(options)}
    for _ in range(calls):
        output = target.generate(
            ids, attention_mask=torch.ones_like(ids), **options, assistant_model=draft, ssd_config=config
        )
        assert output.ssd_stats.draft_failure is None
        speculated += output.ssd_stats.tokens_per_round
        new = pad(output.sequences, (0, 3))[:, prompt.shape[1] + skipped :][:, :3]  # all rows may end earlier
        counts += torch.bincount(new @ DIGITS, minlength=SMALL**3)
    assert speculated / calls > at_least
    return counts, exact_probabilities(target, prompt) if exact is None else exact


def noise_of_rounds(monkeypatch):
    """The mutant of coupled calls: noise belongs to a round, as where drafted tokens have noise of their own."""
    monkeypatch.setattr(Noise, "drawn_at", lambda self, purpose, *place: (purpose, *place))


def chi_square(counts, probabilities):
    """The p-value of the counts of each string, of which the rare ones count as one."""
    assert counts[probabilities == 0].sum() == 0
    return stats.chisquare(*cells(counts, probabilities)).pvalue


def power_of(counts, probabilities):
    """
    How likely the test would fail again, with a p-value below 1e-3 or an impossible string, if strings were distributed
    as these. The chi-square statistic minus its degrees of freedom estimates its non-centrality.
    """
    observed, expected = cells(counts, probabilities)
    degrees = len(observed) - 1
    excess = max(float(stats.chisquare(observed, expected).statistic) - degrees, 0)
    passes = stats.ncx2.cdf(stats.chi2.isf(1e-3, degrees), degrees, excess)
    return 1 - passes * math.exp(-float(counts[probabilities == 0].sum()))


def cells(counts, probabilities):
    """The observed and expected counts of the chi-square test."""
    expected = probabilities.double() * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare].double(), counts[rare].double().sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    return observed, expected * observed.sum() / expected.sum()
