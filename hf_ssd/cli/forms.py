"""Which drafts would pay for a target that has none? Measures the target alone, and computes the rest."""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from .. import theory
from ..cache.cache_name import cache_argument
from ..generation.proposers.ngrams import NgramIndex
from . import prompts
from .methods import sampling, time_of
from .models import Model
from .verdict import PAYS, in_lines

LOOKAHEADS = (1, 2, 3, 4, 6, 8)
LAYERS = (1, 2, 4)
AGREES = 0.7  # acceptance rate of a draft that was trained on the target's own text


@dataclass
class Forms:
    """The drafts that would pay for a target. Speeds are relative to plain decoding, on the target's device."""

    seconds: dict[int, float]  # of a forward pass, by its number of tokens
    ngrams: float  # speed with n-grams of the text
    ngram_lookahead: int  # the lookahead that gives this speed
    # Of a trained draft, by its number of layers: `seconds` of a token, `speed` at an acceptance rate of `AGREES`, and
    # `needs`, the acceptance rate from which it pays, `None` if it never does.
    trained: dict[int, dict]

    @property
    def pays(self) -> bool:
        return max([self.ngrams, *(draft["speed"] for draft in self.trained.values())]) >= PAYS

    def verdict(self) -> str:
        speed, best = max([(draft["speed"], layers) for layers, draft in self.trained.items()], default=(0.0, 0))
        if not self.pays:
            return "no: neither n-grams nor a trained draft would be faster than plain decoding"
        if self.ngrams >= speed:
            return f"n-grams: {self.ngrams:.2f} times plain decoding on these prompts, without a draft model"
        also = f"; n-grams give {self.ngrams:.2f} without training" if self.ngrams >= PAYS else ""
        return f"a trained {best}-layer draft: {speed:.2f} times plain decoding at acceptance {AGREES}{also}"

    def in_words(self) -> str:
        one, (widest, longest) = self.seconds[1], max(self.seconds.items())
        lines = {
            "times": f"{1e3 * one:.1f} ms for a token, {longest / one:.2f} times as long for {widest} tokens at once",
            "n-grams": f"{self.ngrams:.2f} times plain decoding, with {self.ngram_lookahead} tokens a round",
        }
        for layers, draft in self.trained.items():
            pays = "never pays" if draft["needs"] is None else f"pays from acceptance {draft['needs']:.2f} on"
            speed = f"{draft['speed']:.2f} times plain decoding at {AGREES}"
            lines[f"{layers}-layer"] = f"{1e3 * draft['seconds']:.1f} ms for a draft token, {pays}; {speed}"
        return in_lines(**lines, pays=self.verdict())


def measure(args: argparse.Namespace, target: Model, texts: list[str], tell: Callable[[str], None]) -> Forms:
    """Loads the target, lets it answer the prompts plainly, and times its forward passes."""
    tell("loading the target")
    model = target.load()
    deadline, answers = time.perf_counter() + args.seconds / 2, []
    for batch in prompts.batches_for(model, target.tokenizer, texts):
        tell(f"plain answer {len(answers) + 1} of {len(texts)}")
        options = {"max_new_tokens": args.max_new_tokens, "max_time": args.seconds / 4, **sampling(args.temperature)}
        answers.append((batch["input_ids"].shape[1], model.generate(**batch, **options)))
        if time.perf_counter() > deadline:
            break
    tell("timing forward passes")
    ids, embed, head = answers[0][1], model.get_input_embeddings(), model.get_output_embeddings()
    seconds = {width: seconds_of(model, ids, width) for width in (1, *(k + 1 for k in LOOKAHEADS))}
    ends = time_of(lambda: head(embed(ids[:, -1:])), model.device)  # without layers
    gains = {k: tokens_a_round(answers, k) * seconds[1] / seconds[k + 1] for k in LOOKAHEADS}
    best, trained = max(gains, key=gains.get), {}
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for layers in [layers for layers in LAYERS if layers < count]:
        step = ends + max(0.0, seconds[1] - ends) * layers / count
        rates = [rate / 100 for rate in range(1, 100) if speed_of(rate / 100, step, seconds) >= PAYS]
        trained[layers] = {"seconds": step, "needs": min(rates, default=None), "speed": speed_of(AGREES, step, seconds)}
    return Forms(seconds, gains[best], best, trained)


@torch.no_grad()
def seconds_of(model: PreTrainedModel, ids: torch.LongTensor, width: int) -> float:
    """Returns the median seconds of a forward pass over a few tokens after a text that is cached."""
    cache = {cache_argument(model): DynamicCache(config=model.config)}
    model(ids, **cache)
    return time_of(model, model.device, ids[:, -1:].expand(-1, width), **cache)


def tokens_a_round(answers: list[tuple[int, torch.LongTensor]], lookahead: int) -> float:
    """Returns how many tokens a round would have given if n-grams of the text had proposed its tokens."""
    rounds = tokens = 0
    for length, ids in answers:
        text, at = ids[0].tolist(), length + 1  # the prefill gives the first token
        index = NgramIndex(text[:at])
        while at < len(text):
            proposed = index.propose(lookahead)
            gained = 1 + len(os.path.commonprefix([proposed, text[at:]]))
            index.tokens += text[at : at + gained]
            at, rounds, tokens = at + gained, rounds + 1, tokens + min(gained, len(text) - at)
    return tokens / rounds if rounds else 1.0


def speed_of(acceptance: float, step: float, seconds: dict[int, float]) -> float:
    """Returns the speed of a draft that works in turn with the target, at the best lookahead."""
    rounds = {k: k * step + seconds[k + 1] for k in LOOKAHEADS}
    return max(theory.expected_tokens(acceptance, k) * seconds[1] / rounds[k] for k in LOOKAHEADS)
