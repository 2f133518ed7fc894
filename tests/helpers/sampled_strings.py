"""Sampled strings of three tokens, of a vocabulary so small that each string has an exact probability."""

import torch
from scipy import stats
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper

import hf_ssd

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
def exact_probabilities(target, prompt=PROMPT):
    """Of tokens 2 to 4: the first comes from the prefill and is summed over."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopKLogitsWarper(4)])
    joint, prefixes = torch.ones(1), prompt
    for _ in range(4):
        logits = target(prefixes).logits[:, -1]
        joint = (joint[:, None] * warpers(prefixes, logits).softmax(-1)).flatten()
        prefixes = every_continuation(prefixes)
    return joint.view(SMALL, -1).sum(0).double()


def every_continuation(prefixes):
    """Each prefix with each token behind it, in the order of their numbers."""
    tokens = torch.arange(SMALL).repeat(len(prefixes))[:, None]
    return torch.cat([prefixes.repeat_interleave(SMALL, 0), tokens], dim=1)


def p_value(target, draft, calls=24, seed=0, at_least=1.1, options=None, prompt=PROMPT, **settings):
    """Of the chi-square test of sampled three-token strings against the exact probabilities."""
    counts, speculated = torch.zeros(SMALL**3), []
    torch.manual_seed(seed)
    config = hf_ssd.SSDConfig(**{"lookahead": 3, "budget": 8, "asynchronous": False, **settings})
    for _ in range(calls):
        output = target.generate(
            prompt.repeat(ROWS, 1),
            attention_mask=torch.ones(ROWS, prompt.shape[1], dtype=torch.long),
            max_new_tokens=5,
            do_sample=True,
            **WARPERS,
            **(options or {}),
            assistant_model=draft,
            ssd_config=config,
            return_dict_in_generate=True,
        )
        speculated.append(output.ssd_stats.tokens_per_round)
        strings = output.sequences[:, prompt.shape[1] + 1 :][:, :3] @ DIGITS
        counts += torch.bincount(strings, minlength=SMALL**3)
    assert sum(speculated) / calls > at_least
    return chi_square(counts, exact_probabilities(target, prompt))


def chi_square(counts, probabilities):
    """The p-value of the counts of each string, of which the rare ones count as one."""
    expected = probabilities * counts.sum()
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    observed = torch.cat([counts[~rare].double(), counts[rare].double().sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    return stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue
