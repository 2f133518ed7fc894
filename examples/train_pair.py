"""Train the embedded pair: a small target and a smaller draft that write Python.

    python examples/train_pair.py --output examples/pair

Nothing is downloaded: the text is that of `pair_corpus.py`. Both models are plain Llama models over one byte-level BPE
tokenizer. The target learns from the text. The draft learns the target's distribution on text that the target itself
wrote, which is what a draft meets when it is used (on-policy distillation, Agarwal et al., ICLR 2024). A run that was
interrupted goes on with the same command.
"""

import argparse
import json
import platform
from importlib import metadata
from pathlib import Path

import torch
from pair_corpus import PACKAGES, licence, read_corpus
from tokenizers import ByteLevelBPETokenizer, pre_tokenizers
from torch.nn import functional as F
from training import (
    acceptance_on_prompts,
    batch,
    checkpoints_of,
    distillation_loss,
    initialize,
    own_text,
    repeats,
    save,
    train,
    unlikelihood,
    write_with,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
# Deep and narrow: on a CPU a small model's time is its number of layers, so the draft is six times faster.
SHAPE = {"hidden_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 432}
TARGET_LAYERS, DRAFT_LAYERS = 12, 2
LOOP_WEIGHT = 0.3  # of repeating itself in the target's loss; with 1.0 fewer loops are left, and the text is worse


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    bpe = ByteLevelBPETokenizer()
    # Each line break is a token of its own, so that a prompt may end with one.
    bpe._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
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


def new_model(layers: int, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    model = LlamaForCausalLM(
        LlamaConfig(
            **SHAPE,
            num_hidden_layers=layers,
            vocab_size=len(tokenizer),
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            initializer_range=0.02,
        )
    )
    initialize(model)
    return model


def pack(texts: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> torch.Tensor:
    """Joins the texts and cuts them into windows of shape `(num_windows, length)`."""
    ids = [token for text in texts for token in [*tokenizer(text, verbose=False)["input_ids"], tokenizer.eos_token_id]]
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def read_text(args: argparse.Namespace, tokenizer=None) -> tuple[torch.Tensor, list[str], PreTrainedTokenizerFast]:
    """
    Returns windows to learn from, the texts held out, and the tokenizer, which learns from the text if there is none.
    What an interrupted run has read is not read again.
    """
    known = args.checkpoints / "text.pt"
    if not known.exists():
        texts, held_out = read_corpus(args.max_files)
        tokenizer = tokenizer or train_tokenizer(texts, args.vocab_size)
        tokenizer.save_pretrained(args.checkpoints)
        save(known, {"windows": pack(texts, tokenizer, args.length), "held_out": held_out})
    state = torch.load(known)
    return state["windows"], state["held_out"], PreTrainedTokenizerFast.from_pretrained(args.checkpoints)


def train_target(target: LlamaForCausalLM, windows: torch.Tensor, args) -> None:
    """The target learns the text."""
    run = torch.compile(target) if args.compile else target

    def loss_of(step):
        ids = batch(windows, step, args.batch_size, args.seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
            logits = run(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())

    train(target, loss_of, args.steps, args.learning_rate, args.checkpoints / "target.pt", "target")


def unlearn_loops(target: LlamaForCausalLM, windows: torch.Tensor, args) -> None:
    """The target goes on learning the text, and that what it writes greedily should not repeat itself."""
    latest = {}

    def loss_of(step):
        i = step // args.steps_per_loops
        if i not in latest:
            latest.clear()
            torch.manual_seed(args.seed + i)
            prompts = windows[torch.randperm(len(windows))[:24], :32]
            latest[i] = write_with(target, prompts, 110, do_sample=False)
        own, text = latest[i], batch(windows, args.steps + step, args.batch_size // 2, args.seed)
        own = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(step))[:8]]
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
            of_text, of_own = (target(input_ids=ids, use_cache=False).logits.float() for ids in (text, own))
        loss = F.cross_entropy(of_text[:, :-1].flatten(0, 1), text[:, 1:].flatten())
        return loss + LOOP_WEIGHT * unlikelihood(of_own, own, repeats(own))

    path = args.checkpoints / "loops.pt"
    train(target, loss_of, args.loop_steps, args.learning_rate / 10, path, "loops", save_every=5 * args.steps_per_loops)


def train_draft(target: LlamaForCausalLM, draft: LlamaForCausalLM, windows: torch.Tensor, args) -> None:
    """The draft starts as the target's embeddings and first layers, and learns from the target's own text."""
    known = target.state_dict()
    draft.load_state_dict({name: known[name] for name in draft.state_dict()})
    texts = own_text(target, windows, args.steps_per_text, args.seed)

    def loss_of(step):
        ids, logits = texts(step)
        return distillation_loss(draft(input_ids=ids, use_cache=False).logits, logits)

    train(draft, loss_of, args.draft_steps, args.learning_rate / 2, args.checkpoints / "draft.pt", "draft")


@torch.no_grad()
def loss_per_byte(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str], length=256) -> float:
    """Returns the loss on texts in nats a byte, in windows of so many tokens that each see themselves alone."""
    windows = pack(texts, tokenizer, length)
    size = sum(len(tokenizer.decode(window[1:]).encode()) for window in windows)
    total = 0.0
    for ids in windows.split(16):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        total += F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
    return round(total / size, 4)


@torch.no_grad()
def acceptance(target: LlamaForCausalLM, draft: LlamaForCausalLM, prompts: torch.Tensor, temperature: int) -> float:
    """Returns the acceptance rate along text of 128 tokens that the target writes behind each prompt.

    The acceptance rate is the chance that one drafted token is accepted: at temperature 0 the two most likely tokens
    agree, at temperature 1 it is `sum(min(p, q))` (Leviathan et al., 2023, Corollary 3.6).
    """
    torch.manual_seed(0)
    ids, first = write_with(target, prompts, 128, do_sample=temperature == 1), prompts.shape[1] - 1
    p = target(input_ids=ids, use_cache=False).logits[:, first:-1].softmax(-1)
    q = draft(input_ids=ids, use_cache=False).logits[:, first:-1].softmax(-1)
    accepted = torch.minimum(p, q).sum(-1) if temperature else (p.argmax(-1) == q.argmax(-1)).float()
    return round(accepted.mean().item(), 3)


def prompts_of(held_out: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> torch.Tensor:
    """Returns up to 32 prompts of 64 tokens, from all of the texts held out."""
    windows = pack(held_out, tokenizer, length)
    return windows[:: max(1, len(windows) // 32)][:32, :64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("pair"))
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints/pair"), help="to go on from")
    parser.add_argument("--max-files", type=int, help="read no more files of a package than this, for a trial")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--loop-steps", type=int, default=200, help="of the target, against repeating itself")
    parser.add_argument("--steps-per-loops", type=int, default=10, help="of these, on one text of the target")
    parser.add_argument("--draft-steps", type=int, default=2400)
    parser.add_argument("--steps-per-text", type=int, default=24, help="of the draft, on one text of the target")
    parser.add_argument("--target", help="folder of a target that is trained already: train a draft for it")
    parser.add_argument("--compare-with", help="folder of a target whose loss is reported too")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--bfloat16", action="store_true", help="the target's matrix products, for CPUs that have them")
    parser.add_argument("--compile", action="store_true", help="the target, by torch.compile")
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(args.seed)

    # 1. The text.
    checkpoints_of(args, ("max_files", "vocab_size", "length", "batch_size", "seed"))
    windows, held_out, tokenizer = read_text(args)
    target, draft = new_model(TARGET_LAYERS, tokenizer), new_model(DRAFT_LAYERS, tokenizer)
    print(f"{windows.numel():,} tokens of Python; target {target.num_parameters():,} parameters, "
          f"draft {draft.num_parameters():,}")  # fmt: skip

    # 2. The target, and then the draft, which learns the target as it ships.
    if args.target:
        target = LlamaForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    else:
        train_target(target, windows, args)
        unlearn_loops(target, windows, args)
    target.to(torch.bfloat16).save_pretrained(args.output / "target")
    target.float().eval()
    train_draft(target, draft, windows, args)
    draft.to(torch.bfloat16).save_pretrained(args.output / "draft")
    draft.float().eval()

    # 3. What they are worth.
    prompts = prompts_of(held_out, tokenizer, args.length)
    models = {"target": (target, tokenizer), "draft": (draft, tokenizer)}
    if args.compare_with:
        other = LlamaForCausalLM.from_pretrained(args.compare_with, dtype=torch.float32)
        models["other_target"] = (other, PreTrainedTokenizerFast.from_pretrained(args.compare_with))
    report = {
        "python": platform.python_version(),
        "packages": {name: f"{metadata.version(name)}, {licence(name)}" for name in PACKAGES},
        "tokens_of_text": windows.numel(),
        "training_tokens": args.steps * args.batch_size * args.length,
        "target_parameters": target.num_parameters(),
        "draft_parameters": draft.num_parameters(),
        "held_out_loss_nats_per_byte": {name: loss_per_byte(*model, held_out) for name, model in models.items()},
        **{f"acceptance_rate_temperature_{t}": acceptance(target, draft, prompts, t) for t in (0, 1)},
        "acceptance_rate_on_prompts": acceptance_on_prompts(target, draft, tokenizer),
    }
    for name in ("target", "draft"):
        tokenizer.save_pretrained(args.output / name)
    (args.output / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
