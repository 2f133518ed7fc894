"""How long the training of a draft takes, from rates that are measured before it starts."""

import argparse
import time
from collections.abc import Callable

import torch
from own_texts import LIKELIEST
from training import learn, optimizers_of

from hf_ssd.cli.methods import synchronize

TOKENS, STEPS = 480_000, 2_600  # of the draft whose acceptance docs/choosing_a_draft.md shows


@torch.no_grad()
def tokens_per_second(target, tokenizer, prompts: list[str], args: argparse.Namespace) -> float:
    """Returns how fast the target writes full batches: their prompts one by one, and a pass for each new token."""
    middle = sorted(prompts, key=len)[len(prompts) // 2]
    prompt = tokenizer(middle, return_tensors="pt")["input_ids"].to(target.device)
    tokens = prompt[:, :1].expand(min(args.batch_size, len(prompts)), 1)
    first_pass, reading, step = (_seconds(lambda ids=ids: target(input_ids=ids)) for ids in (prompt, prompt, tokens))
    return len(tokens) / (len(tokens) * reading / args.max_new_tokens + step)


def steps_per_second(draft, loss: Callable[..., torch.Tensor], args: argparse.Namespace) -> float:
    """
    Returns how fast a draft learns, from a step of random tokens after a small one. The draft's weights change.

    Args:
        draft (`PreTrainedModel`): The draft, on its device.
        loss (`Callable`): Returns the loss for the draft, the tokens of a step, places in them, and the likely tokens
            of these places with their probabilities.
        args (`argparse.Namespace`): The options of `train_draft.py`.
    """
    optimizers = optimizers_of(draft, args.learning_rate)
    for rows in (1, args.rows):
        synchronize(draft.device)
        started = time.perf_counter()
        ids = torch.randint(draft.config.vocab_size, (rows, args.length), device=draft.device)
        places = torch.arange(rows * min(args.max_new_tokens, args.length), device=draft.device)
        likely = torch.randint(draft.config.vocab_size, (len(places), LIKELIEST), device=draft.device)
        p = torch.full_like(likely, 1 / LIKELIEST, dtype=torch.float32)
        learn(draft, optimizers, loss(draft, ids, places, likely, p), args.learning_rate)
        synchronize(draft.device)
    return 1 / (time.perf_counter() - started)


def estimate(tokens: float, steps: float, minutes: float, writing: float) -> str:
    """
    Returns what the rates mean for a training, for people.

    Args:
        tokens, steps (`float`): The rates, per second.
        minutes, writing (`float`): The options of `train_draft.py`.
    """
    write, learn = TOKENS / tokens / 60, STEPS / steps / 60
    text = f"Writing: about {tokens:,.3g} tokens/s. Learning: about {1 / steps:,.3g} s a step.\n"
    if minutes:
        text += (
            f"{minutes:g} minutes give about {60 * minutes * writing * tokens:,.0f} tokens and "
            f"{60 * minutes * (1 - writing) * steps:,.0f} steps.\n"
        )
    return text + (
        f"{TOKENS:,} tokens and {STEPS:,} steps take about {_hours(write)} and {_hours(learn)}: "
        f"--minutes {max(1, round(write + learn))} --writing {write / (write + learn):.2f}"
    )


def _hours(minutes: float) -> str:
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.0f} h"


def _seconds(work: Callable) -> float:
    started = time.perf_counter()
    synchronize(work().logits.device)
    return time.perf_counter() - started
