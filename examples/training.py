"""Training of small models that goes on where it was interrupted."""

import argparse
import itertools
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import LlamaForCausalLM, PreTrainedModel, set_seed

import hf_ssd
from hf_ssd.cli.methods import sampling
from hf_ssd.cli.prompts import SNIPPETS


def optimizers_of(model: PreTrainedModel, learning_rate: float) -> list[torch.optim.Optimizer]:
    """
    Returns Muon for the matrices of the layers and AdamW for everything else, of the same size of step. Embeddings of
    large entries have a `scale` by which their steps are larger.
    """
    parts = ("embed", "lm_head", "wte", "wpe")
    tables = [p for name, p in model.named_parameters() if any(part in name for part in parts)]
    known = {id(table) for table in tables}
    matrices = [p for p in model.parameters() if p.dim() == 2 and id(p) not in known]
    groups = [{"params": [p for p in model.parameters() if p.dim() != 2 and id(p) not in known]}]
    groups += [{"params": [table], "scale": max(1.0, 10 * table.detach().abs().median().item())} for table in tables]
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def cosine(share: float, step_share: float) -> float:
    """
    Returns the share of the learning rate: up to 1 in the first fiftieth of a training, and down to 0 in the rest.

    Args:
        share (`float`): How much of the training is over.
        step_share (`float`): How much of it one step is.
    """
    return min(1.0, (share + step_share) / max(0.02, step_share)) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def train(
    model: PreTrainedModel,
    loss_of: Callable[[int], torch.Tensor],
    steps: int,
    learning_rate: float,
    checkpoint: Path,
    name: str,
    save_every: int = 200,
    seconds: float = math.inf,
    measure: Callable[[], str] | None = None,
) -> int:
    """
    Trains a model, from its checkpoint if there is one.

    Args:
        model (`PreTrainedModel`): Ends with the weights of the last step.
        loss_of (`Callable[[int], torch.Tensor]`): The loss of a step. It depends on nothing but the weights and the
            number of the step, so that an interrupted run ends like one that was not.
        steps (`int`): The number of steps, those before the checkpoint included.
        learning_rate (`float`): The highest.
        checkpoint (`Path`): The file.
        name (`str`): What the progress bar shows.
        save_every (`int`, *optional*, defaults to 200): Steps between two checkpoints.
        seconds (`float`, *optional*): Stops after so many seconds, those before the checkpoint included, if the steps
            take longer. The learning rate falls by the clock too.
        measure (`Callable[[], str]`, *optional*): Returns a figure of the model, which the progress bar shows.

    Returns:
        `int`: The number of steps, those before the checkpoint included.
    """
    optimizers, done, spent, figure = optimizers_of(model, learning_rate), 0, 0.0, {}
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        for optimizer, known in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(known)
        done, spent = state["done"], state.get("seconds", 0.0)
    started = time.perf_counter() - spent
    by_clock = seconds < math.inf
    numbers = itertools.count(done) if by_clock else range(done, steps)
    progress = tqdm(numbers, name, total=None if by_clock else steps, initial=done, unit="step", mininterval=1)
    for step in progress:
        spent = time.perf_counter() - started
        if spent >= seconds or step == steps:
            break
        share = max(step / steps, spent / seconds)
        loss = loss_of(step)
        learn(model, optimizers, loss, learning_rate * cosine(share, 1 / steps))
        done = step + 1
        is_last = done == steps or time.perf_counter() - started >= seconds
        if measure is not None and (done % save_every == 0 or is_last):
            figure = {"held_out": measure()}
        if step % 20 == 0 or is_last:
            left = {"left": f"{max(0.0, seconds - spent) / 60:.0f} min"} if by_clock else {}
            progress.set_postfix(loss=f"{loss.item():.3f}", **figure, **left)
        if done % save_every == 0 or is_last:
            save(checkpoint, {"done": done, "seconds": time.perf_counter() - started, "model": model.state_dict(),
                              "optimizers": [optimizer.state_dict() for optimizer in optimizers]})  # fmt: skip
    return done


def learn(
    model: PreTrainedModel, optimizers: list[torch.optim.Optimizer], loss: torch.Tensor, learning_rate: float
) -> None:
    """Changes a model's weights by one step."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group.get("scale", 1.0)
        optimizer.step()
        optimizer.zero_grad()


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


def initialize(model: PreTrainedModel) -> None:
    """Draws the matrices of the layers, of the residual branches the smaller the deeper the model is (GPT-2's rule)."""
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "embed" not in name:
            is_last_of_branch = "o_proj" in name or "down_proj" in name
            torch.nn.init.normal_(
                weight, std=0.06 / (2 * model.config.num_hidden_layers if is_last_of_branch else 1) ** 0.5
            )


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
    return acceptance(drafted_rows(target, draft, tokenizer, SNIPPETS))


def drafted_rows(
    target, draft, tokenizer, prompts: list[str], temperature: float = 0.0, assistant_tokenizer=None
) -> list[tuple]:
    """
    Lets a draft propose five tokens at a time after prompts, until there are 64.

    Args:
        target, draft (`PreTrainedModel`): The models.
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        prompts (`list[str]`): The prompts, with their chat templates.
        temperature (`float`, *optional*, defaults to 0.0): 0 is greedy.
        assistant_tokenizer (`PreTrainedTokenizerBase`, *optional*): The draft's tokenizer, if it differs.

    Returns:
        `list[tuple]`: For each row of each round the lookahead, the number of tokens that were accepted, and the hit.
    """
    rows, config = [], hf_ssd.SSDConfig(lookahead=5, asynchronous=False)
    both = {"tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer} if assistant_tokenizer else {}
    for seed, prompt in enumerate(prompts):
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False,
                           add_special_tokens=tokenizer.chat_template is None).to(target.device)  # fmt: skip
        set_seed(seed)
        output = hf_ssd.enable(target).generate(
            **inputs, max_new_tokens=64, **sampling(temperature), assistant_model=draft, ssd_config=config,
            return_dict_in_generate=True, **both,
        )  # fmt: skip
        rows += output.ssd_stats.verified_rows()
    return rows


def acceptance(rows: list[tuple]) -> float:
    """Returns the share of tested tokens that were accepted, from the rows of [`drafted_rows`]."""
    tested = sum(min(accepted + 1, k) for k, accepted, _ in rows)
    return round(sum(accepted for k, accepted, _ in rows if k) / tested, 3)


def acceptance_by_position(rows: list[tuple], lookahead: int = 5) -> list[float]:
    """Returns the chance that each drafted token is accepted if those before it were, from [`drafted_rows`]."""
    reached = [sum(k > place and accepted >= place for k, accepted, _ in rows) for place in range(lookahead)]
    passed = [sum(k > place and accepted > place for k, accepted, _ in rows) for place in range(lookahead)]
    return [round(both / max(1, tested), 3) for both, tested in zip(passed, reached)]


def chance_by_position(pairs: list[tuple[torch.Tensor, torch.Tensor]], temperature: int) -> list[float]:
    """
    Returns the chance that each token of a speculation is accepted if the tokens before it were.

    Args:
        pairs (`list[tuple[torch.Tensor, torch.Tensor]]`): For each token of a speculation, the target's and the draft's
            logits of shape `(texts, places, vocab_size)`.
        temperature (`int`): 1 for tokens that are drawn, 0 for the most likely ones.
    """
    if temperature:
        accepted = [torch.minimum(theirs.softmax(-1), ours.softmax(-1)).sum(-1) for theirs, ours in pairs]
    else:
        accepted = [(theirs.argmax(-1) == ours.argmax(-1)).float() for theirs, ours in pairs]
    reached = torch.stack(accepted).cumprod(0).mean((1, 2))
    before = torch.cat([torch.ones(1), reached[:-1]])
    return [round(rate, 3) for rate in (reached / before.clamp(min=1e-9)).tolist()]
