"""Training of small models that goes on where it was interrupted."""

import argparse
import json
import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import LlamaForCausalLM

import hf_ssd
from hf_ssd.cli.prompts import SNIPPETS


def optimizers_of(model: LlamaForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Returns Muon for the matrices of the layers and AdamW for everything else, of the same size of step."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def cosine(step: int, steps: int) -> float:
    """Returns the share of the learning rate: up to 1 in the first fiftieth of the steps, and down to 0 in the rest."""
    warmup = max(1, steps // 50)
    return min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))


def train(
    model: LlamaForCausalLM,
    loss_of: Callable[[int], torch.Tensor],
    steps: int,
    learning_rate: float,
    checkpoint: Path,
    name: str,
    save_every: int = 200,
) -> None:
    """
    Trains a model, from its checkpoint if there is one.

    Args:
        model (`LlamaForCausalLM`): Ends with the weights of the last step.
        loss_of (`Callable[[int], torch.Tensor]`): The loss of a step. It depends on nothing but the weights and the
            number of the step, so that an interrupted run ends like one that was not.
        steps (`int`): So many in all, those before the checkpoint included.
        learning_rate (`float`): The highest.
        checkpoint (`Path`): The file.
        name (`str`): What the progress bar shows.
        save_every (`int`, *optional*, defaults to 200): Steps between two checkpoints.
    """
    optimizers, done = optimizers_of(model, learning_rate), 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        for optimizer, known in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(known)
        done = state["done"]
    progress = tqdm(range(done, steps), name, total=steps, initial=done, unit="step", mininterval=1)
    for step in progress:
        loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * cosine(step, steps)
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")
        if (step + 1) % save_every == 0 or step + 1 == steps:
            save(checkpoint, {"done": step + 1, "model": model.state_dict(),
                              "optimizers": [optimizer.state_dict() for optimizer in optimizers]})  # fmt: skip


def save(path: Path, state: dict) -> None:
    """Writes a file so that it is there as a whole or as it was before."""
    torch.save(state, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def checkpoints_of(args: argparse.Namespace, names: tuple[str, ...]) -> Path:
    """
    Returns the folder `args.checkpoints`, made if need be.

    Raises:
        `ValueError`: it is of a run in which one of the options in `names` was another.
    """
    args.checkpoints.mkdir(parents=True, exist_ok=True)
    path, options = args.checkpoints / "options.json", {name: str(getattr(args, name)) for name in names}
    if path.exists() and json.loads(path.read_text()) != options:
        raise ValueError(f"{args.checkpoints} is of a run with other options; remove it, or name another folder.")
    path.write_text(json.dumps(options))
    return args.checkpoints


def batch(windows: torch.Tensor, step: int, size: int, seed: int) -> torch.Tensor:
    """Returns the windows of a step. Each epoch has an order of its own, and leaves out what fills no batch."""
    epoch, place = divmod(step, len(windows) // size)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed + 1000 * epoch))
    return windows[order[place * size : (place + 1) * size]]


def distillation_loss(draft_logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """Returns KL(target || draft) per token, in nats."""
    student, teacher = draft_logits.log_softmax(-1).flatten(0, 1), target_logits.log_softmax(-1).flatten(0, 1)
    return F.kl_div(student, teacher, log_target=True, reduction="batchmean")


def repeats(ids: torch.Tensor, size: int = 8) -> torch.Tensor:
    """Returns for each token whether the piece of `size` tokens that ends with it was in its row twice before."""
    found = torch.zeros_like(ids, dtype=torch.bool)
    for row, tokens in enumerate(ids.tolist()):
        seen = Counter()
        for end in range(size, len(tokens) + 1):
            piece = tuple(tokens[end - size : end])
            found[row, end - 1] = seen[piece] >= 2
            seen[piece] += 1
    return found


def unlikelihood(logits: torch.Tensor, ids: torch.Tensor, unwanted: torch.Tensor) -> torch.Tensor:
    """
    Returns the mean of -log(1 - p) of the unwanted tokens (Welleck et al., Neural Text Generation with Unlikelihood
    Training, ICLR 2020).

    Args:
        logits (`torch.Tensor` of shape `(rows, length, vocab_size)`): At each token, of the next one.
        ids, unwanted (`torch.Tensor` of shape `(rows, length)`): The tokens, and which of them are unwanted.
    """
    p = logits[:, :-1].softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    unwanted = unwanted[:, 1:]
    return -((1 - p).clamp(min=1e-4).log() * unwanted).sum() / unwanted.sum().clamp(min=1)


@torch.no_grad()
def write_with(target: LlamaForCausalLM, prompts: torch.Tensor, new_tokens: int, do_sample: bool) -> torch.Tensor:
    """Returns prompts with so many tokens behind them, greedy or drawn at temperature 1."""
    return target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        **({"do_sample": True, "top_k": 0} if do_sample else {"do_sample": False}),
    )


def own_text(target: LlamaForCausalLM, windows: torch.Tensor, steps_per_text: int, seed: int):
    """
    Returns a function of a step that gives what a draft learns from then: 8 rows of text that the target writes behind
    beginnings of windows, half of the texts greedily, and the target's logits there.
    """
    latest = {}

    def rows_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        i = step // steps_per_text
        if i not in latest:
            latest.clear()
            torch.manual_seed(seed + i)
            prompts = windows[torch.randperm(len(windows))[:48], :32]
            ids = write_with(target, prompts, 160, do_sample=i % 2 == 1)
            with torch.no_grad():
                latest[i] = ids, target(input_ids=ids, use_cache=False).logits
        ids, logits = latest[i]
        rows = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed + step))[:8]
        return ids[rows], logits[rows]

    return rows_of


def acceptance_on_prompts(target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer) -> float:
    """Returns the share of the tokens drafted after prompts, five at a time, greedy, that is accepted if tested."""
    rows, config = [], hf_ssd.SSDConfig(lookahead=5, asynchronous=False)
    for prompt in SNIPPETS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = hf_ssd.enable(target).generate(
            **inputs, max_new_tokens=64, do_sample=False, assistant_model=draft, ssd_config=config,
            return_dict_in_generate=True,
        )  # fmt: skip
        rows += output.ssd_stats.verified_rows()
    tested = sum(min(accepted + 1, k) for k, accepted, _ in rows)
    return round(sum(accepted for _, accepted, _ in rows) / tested, 3)
