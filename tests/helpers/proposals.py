"""What a speculator proposes, just in time and ahead, against distributions that are computed without a cache."""

import torch
from transformers import GenerationConfig

from hf_ssd import SSDConfig
from hf_ssd.drafting.cache_shapes import shape_for
from hf_ssd.drafting.drafters import drafter_for
from hf_ssd.drafting.speculator import Speculator
from hf_ssd.rounds import AHEAD, Outcome, Plan

PROMPTS = [[2, 3, 1], [3, 1, 2, 2, 0, 1]]
LOOKAHEAD = 3
PLAN = Plan(AHEAD, LOOKAHEAD, LOOKAHEAD, budget=8)
EXACT = {"atol": 1e-5, "rtol": 0}


def new_speculator(model, **warpers) -> Speculator:
    config, prompts = SSDConfig(lookahead=LOOKAHEAD, budget=8), [torch.tensor(prompt) for prompt in PROMPTS]
    generation = GenerationConfig(max_length=80, eos_token_id=None, pad_token_id=0, do_sample=True, **warpers)
    speculator = Speculator(
        drafter_for(model, config, generation, prompts, seed=5), config, shape_for(config), limit=80
    )
    speculator.begin()
    return speculator


@torch.inference_mode()
def check_proposals(speculator: Speculator, reference, features=lambda texts, known: None, rounds: int = 6) -> None:
    """
    Each third round hits, and the others miss.

    Args:
        reference (`Callable`): Takes a text, tokens after it of which the target has not verified the first ones, and
            how many tokens these are. Returns the distributions of the others.
        features (`Callable`): Takes the texts, and how many tokens of each have features. Returns how the draft
            receives features of the others.
    """
    texts, accepted, drafted, known = [list(prompt) for prompt in PROMPTS], [0, 0], [[], []], [0, 0]
    for turn in range(rounds):
        cache, is_hit = speculator.prepared, turn % 3 == 2
        used = cache.branches if cache else [{}, {}]
        tokens = range(speculator.drafter.vocab_size)
        bonus = [next(t for t in tokens if (k, t) not in of_row) for k, of_row in zip(accepted, used)]
        if is_hit:
            accepted, bonus = [row[0] for row in cache.accepted], [row[0] for row in cache.bonus]
        outcome = Outcome.of(drafted, accepted, bonus)
        texts = [text + tokens for text, tokens in zip(texts, outcome.tokens)]
        answer = speculator.answer(Outcome(outcome.tokens, states=features(texts, known)), PLAN)
        known, drafted = [len(text) - 1 for text in texts], answer.tokens
        assert answer.record.hits == [is_hit] * 2
        speculator.prepare(PLAN)
        accepted = [turn % (LOOKAHEAD + 1), (turn + 2) % (LOOKAHEAD + 1)]
        if is_hit and speculator.drafter.reads_target:
            continue
        cache = speculator.prepared
        told, count = torch.cat(cache.probabilities, dim=2), 0
        for row, text in enumerate(texts):
            torch.testing.assert_close(answer.probabilities[row], reference(text, drafted[row], 0), **EXACT)
            for place, (k, token) in enumerate(zip(cache.accepted[row], cache.bonus[row])):
                if k >= 0:
                    follow, count = [*drafted[row][:k], token, *cache.tokens[row][place]], count + 1
                    torch.testing.assert_close(told[row, place], reference(text, follow, k + 1), **EXACT)
        assert count >= 8
