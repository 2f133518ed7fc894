"""Train the embedded pair: a small target and a smaller draft that write Python.

    python examples/train_pair.py --output examples/pair

The text is the standard library of the interpreter that runs this script, so nothing is downloaded. Both models are
plain Llama models over one byte-level BPE tokenizer. The target learns from the text. The draft learns from the
target: first its distribution on the same text, then its distribution on text that the target itself wrote, which is
what a draft meets when it is used (on-policy distillation, Agarwal et al., ICLR 2024).
"""

import argparse
import json
import math
import platform
import random
import sysconfig
import time
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
NOT_PROSE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "idlelib", "turtledemo",
             "encodings", "pydoc_data", "__pycache__"}  # fmt: skip
# Deep and narrow: on a CPU a small model's time is its number of layers, so the draft is six times faster.
TARGET_SHAPE = {"hidden_size": 128, "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
                "intermediate_size": 352}  # fmt: skip
DRAFT_SHAPE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
               "intermediate_size": 352}  # fmt: skip


def read_standard_library(max_files: int | None = None, held_out_every: int = 40) -> tuple[list[str], list[str]]:
    """Returns the texts to learn from and the texts held out, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if not NOT_PROSE & set(path.relative_to(root).parts)][
        :max_files
    ]
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    texts = [text for text in texts if len(text) > 500]
    return [t for i, t in enumerate(texts) if i % held_out_every], texts[::held_out_every]


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def new_model(shape: dict, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A model whose residual branches start smaller the deeper it is (GPT-2's rule)."""
    model = LlamaForCausalLM(
        LlamaConfig(
            **shape,
            vocab_size=len(tokenizer),
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            initializer_range=0.02,
        )
    )
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "embed" not in name:
            is_last_of_branch = "o_proj" in name or "down_proj" in name
            depth = 2 * shape["num_hidden_layers"] if is_last_of_branch else 1
            torch.nn.init.normal_(weight, std=0.06 / depth**0.5)
    return model


def pack(texts: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> torch.Tensor:
    """Joins the texts and cuts them into windows of shape `(num_windows, length)`."""
    ids = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def optimizer_and_schedule(model, learning_rate: float, steps: int):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
    )
    return optimizer, schedule


def step(loss: torch.Tensor, model, optimizer, schedule) -> None:
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()


def distillation_loss(draft_logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """Returns KL(target || draft) per token, in nats."""
    student, teacher = draft_logits.log_softmax(-1).flatten(0, 1), target_logits.log_softmax(-1).flatten(0, 1)
    return F.kl_div(student, teacher, log_target=True, reduction="batchmean")


def shuffled_batches(windows: torch.Tensor, steps: int, batch_size: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    epochs = 1 + steps * batch_size // len(windows)
    order = torch.cat([torch.randperm(len(windows), generator=generator) for _ in range(epochs)])
    for i in range(steps):
        yield windows[order[i * batch_size : (i + 1) * batch_size]]


def train_target(target, windows: torch.Tensor, args) -> None:
    """The target learns the text."""
    parts = optimizer_and_schedule(target, args.learning_rate, args.steps)
    progress = tqdm(
        shuffled_batches(windows, args.steps, args.batch_size, args.seed), "target", args.steps, unit="step"
    )
    for i, ids in enumerate(progress):
        logits = target(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        step(loss, target, *parts)
        if i % 20 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")


def copy_first_layers(target, draft) -> None:
    """The draft starts as the target's embeddings and first layers, so it has less to learn."""
    known = target.state_dict()
    draft.load_state_dict({name: known[name] for name in draft.state_dict()})


def train_draft(target, draft, windows: torch.Tensor, args) -> None:
    """The draft learns the target's distribution on the text."""
    parts = optimizer_and_schedule(draft, args.learning_rate, args.draft_steps)
    batches = shuffled_batches(windows, args.draft_steps, args.batch_size, args.seed + 1)
    progress = tqdm(batches, "draft, on the text", args.draft_steps, unit="step")
    for i, ids in enumerate(progress):
        with torch.no_grad():
            logits = target(input_ids=ids, use_cache=False).logits
        loss = distillation_loss(draft(input_ids=ids, use_cache=False).logits, logits)
        step(loss, draft, *parts)
        if i % 20 == 0:
            progress.set_postfix(kl=f"{loss.item():.3f}")


@torch.no_grad()
def write_with_target(target, prompts: torch.Tensor, new_tokens: int, do_sample: bool) -> torch.Tensor:
    return target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        **({"do_sample": True, "top_k": 0} if do_sample else {"do_sample": False}),
    )


def train_draft_on_policy(target, draft, windows: torch.Tensor, args) -> None:
    """The draft learns the target's distribution on the target's own text, half of it greedy and half sampled."""
    steps_per_text = 12
    parts = optimizer_and_schedule(draft, args.learning_rate / 2, args.on_policy_rounds * steps_per_text)
    generator = torch.Generator().manual_seed(args.seed + 2)
    progress = tqdm(range(args.on_policy_rounds), desc="draft, on the target's own text", unit="round")
    for i in progress:
        prompts = windows[torch.randperm(len(windows), generator=generator)[:48], :32]
        ids = write_with_target(target, prompts, 160, do_sample=i % 2 == 1)
        with torch.no_grad():
            logits = target(input_ids=ids, use_cache=False).logits
        for _ in range(steps_per_text):
            rows = torch.randperm(len(ids), generator=generator)[:8]
            loss = distillation_loss(draft(input_ids=ids[rows], use_cache=False).logits, logits[rows])
            step(loss, draft, *parts)
        progress.set_postfix(kl=f"{loss.item():.3f}")


@torch.no_grad()
def measure(target, draft, held_out: torch.Tensor) -> dict:
    """Losses on held-out text, and acceptance rates along text that the target continues from held-out prompts.

    The acceptance rate is the chance that one drafted token is accepted: at temperature 0 the two most likely tokens
    agree, at temperature 1 it is `sum(min(p, q))` (Leviathan et al., 2023, Corollary 3.6).
    """
    result = {}
    for name, model in (("target", target), ("draft", draft)):
        logits = model(input_ids=held_out[:64], use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), held_out[:64, 1:].flatten()).item()
        result[f"{name}_loss_nats_per_token"] = round(loss, 3)
    for temperature in (0, 1):
        ids = write_with_target(target, held_out[:32, :64], 128, do_sample=temperature == 1)
        p = target(input_ids=ids, use_cache=False).logits[:, 63:-1].softmax(-1)
        q = draft(input_ids=ids, use_cache=False).logits[:, 63:-1].softmax(-1)
        accepted = torch.minimum(p, q).sum(-1) if temperature else (p.argmax(-1) == q.argmax(-1)).float()
        result[f"acceptance_rate_temperature_{temperature}"] = round(accepted.mean().item(), 3)
    return result


def minutes_since(start: float) -> float:
    return round((time.perf_counter() - start) / 60, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("pair"))
    parser.add_argument("--max-files", type=int, help="read no more files than this, for a trial")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=2800)
    parser.add_argument("--draft-steps", type=int, default=700)
    parser.add_argument("--on-policy-rounds", type=int, default=18)
    parser.add_argument("--target", help="folder of a target that is trained already: train a draft for it")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    start = time.perf_counter()

    texts, held_out_texts = read_standard_library(args.max_files)
    tokenizer = train_tokenizer(texts, args.vocab_size)
    windows, held_out = (pack(t, tokenizer, args.length) for t in (texts, held_out_texts))
    target, draft = new_model(TARGET_SHAPE, tokenizer), new_model(DRAFT_SHAPE, tokenizer)
    print(f"{windows.numel():,} tokens of Python; target {target.num_parameters():,} parameters, "
          f"draft {draft.num_parameters():,}")  # fmt: skip

    if args.target:
        target = LlamaForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    else:
        train_target(target, windows, args)
    target_minutes = minutes_since(start)
    target.to(torch.bfloat16).float().eval()  # the draft learns the target as it ships
    copy_first_layers(target, draft)
    train_draft(target, draft, windows, args)
    train_draft_on_policy(target, draft, windows, args)
    draft.eval()

    report = {
        "python": platform.python_version(),
        "training_tokens": args.steps * args.batch_size * args.length,
        "target_parameters": target.num_parameters(),
        "draft_parameters": draft.num_parameters(),
        "minutes_target": target_minutes,
        "minutes_draft": round(minutes_since(start) - target_minutes, 1),
        "threads": args.num_threads,
        **measure(target, draft, held_out),
    }
    for name, model in (("target", target), ("draft", draft)):
        model.to(torch.bfloat16).save_pretrained(args.output / name)
        tokenizer.save_pretrained(args.output / name)
    (args.output / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    prompt = tokenizer("def read_lines(path):\n", return_tensors="pt")["input_ids"]
    print(tokenizer.decode(target.float().generate(prompt, attention_mask=torch.ones_like(prompt),
                                                   max_new_tokens=60, do_sample=False)[0]))  # fmt: skip


if __name__ == "__main__":
    main()
