"""Turn the draft of the embedded pair into a parallel one, which guesses all tokens of a speculation in one pass.

    python examples/train_parallel_draft.py --output examples/pair/parallel_draft

The draft learns from the target's own text what follows a token behind which there are only mask tokens (PARD; An et
al., ICLR 2026). A sequence is fed once, and behind it the mask tokens that follow each of its tokens: each sees the
text up to the token it follows and the mask tokens between. Of the mask tokens farther behind fewer are fed
(conditional drop): those that stay are among those whose predecessor has stayed, so that all see what they would see in
use. Each distance counts the same in the loss, however many of its mask tokens are left.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from tqdm.auto import tqdm
from train_pair import (
    minutes_since,
    optimizer_and_schedule,
    pack,
    read_standard_library,
    step,
    write_with_target,
)
from transformers import AutoTokenizer, LlamaForCausalLM

PAIR = Path(__file__).parent / "pair"


def with_mask_token(draft: LlamaForCausalLM) -> LlamaForCausalLM:
    """Gives a draft a mask token behind its vocabulary, which begins as the mean of its tokens."""
    mask_token = draft.config.vocab_size
    draft.resize_token_embeddings(mask_token + 1, pad_to_multiple_of=64, mean_resizing=False)
    with torch.no_grad():
        embeddings = draft.get_input_embeddings().weight
        embeddings[mask_token:] = embeddings[:mask_token].mean(0)
    draft.config.pard_token = mask_token
    return draft


def with_layers(draft: LlamaForCausalLM, target: LlamaForCausalLM, count: int) -> LlamaForCausalLM:
    """Returns a draft of so many layers, of which those that the draft lacks are the target's."""
    deeper = LlamaForCausalLM(type(draft.config)(**{**draft.config.to_dict(), "num_hidden_layers": count}))
    known = {**target.state_dict(), **draft.state_dict()}
    deeper.load_state_dict({name: known[name] for name in deeper.state_dict()})
    return deeper


def drop_mask_tokens(length: int, lookahead: int, keep: float, least: float, generator: torch.Generator):
    """
    Chooses the mask tokens that are fed behind a sequence.

    Args:
        length (`int`): Of the sequence.
        lookahead (`int`): Tokens of a speculation; a token is followed by up to one mask token less.
        keep, least (`float`): Of the tokens that have `d - 1` mask tokens, the share that has `d`, and the least share
            of all tokens that has any number of them.

    Returns:
        Two `torch.LongTensor` of shape `(nodes,)`: for each token of the sequence, and then for each mask token, the
        token that it follows and how many tokens it is behind that.
    """
    followed, distance = [torch.arange(length)], [torch.zeros(length, dtype=torch.long)]
    left = torch.arange(length - lookahead)  # what all mask tokens guess is part of the sequence
    for d in range(1, lookahead):
        count = int(max(keep**d, least) * (length - lookahead))
        left = left[torch.randperm(len(left), generator=generator)[:count]].sort().values
        followed.append(left)
        distance.append(torch.full_like(left, d))
    return torch.cat(followed), torch.cat(distance)


def all_logits(draft, ids: torch.LongTensor, followed: torch.LongTensor, distance: torch.LongTensor) -> torch.Tensor:
    """Feeds sequences `(batch_size, length)` with their mask tokens, and returns logits of the target's tokens."""
    masks = ids.new_full((len(ids), len(followed) - ids.shape[1]), draft.config.pard_token)
    is_text = distance == 0
    sees = is_text & (followed <= followed[:, None])
    sees |= ~is_text & (followed == followed[:, None]) & (distance <= distance[:, None])
    mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[None, None]
    logits = draft(
        input_ids=torch.cat([ids, masks], dim=1),
        position_ids=(followed + distance)[None],
        attention_mask=mask.expand(len(ids), -1, -1, -1),
        use_cache=False,
    ).logits
    return logits[..., : draft.config.pard_token]


def loss_by_distance(logits, target_logits, followed, distance, lookahead: int) -> torch.Tensor:
    """Returns KL(target || draft) in nats, the mean over the distances, for each of which it is a mean over tokens."""
    student, teacher = logits.log_softmax(-1), target_logits.log_softmax(-1)[:, followed + distance]
    divergence = F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1).mean(0)
    sums = torch.zeros(lookahead).index_add(0, distance, divergence)
    return (sums / torch.bincount(distance, minlength=lookahead)).mean()


def train(target, draft, windows: torch.Tensor, args) -> None:
    """The draft learns from texts that the target writes, half of them greedily."""
    steps = args.rounds * args.steps_per_text
    parts = optimizer_and_schedule(draft, args.learning_rate, steps)
    generator = torch.Generator().manual_seed(args.seed)
    progress = tqdm(total=steps, desc="parallel draft", unit="step")
    for i in range(args.rounds):
        prompts = windows[torch.randperm(len(windows), generator=generator)[:48], :32]
        ids = write_with_target(target, prompts, 160, do_sample=i % 2 == 1)
        with torch.no_grad():
            target_logits = target(input_ids=ids, use_cache=False).logits
        for _ in range(args.steps_per_text):
            rows = torch.randperm(len(ids), generator=generator)[: args.batch_size]
            chosen = drop_mask_tokens(ids.shape[1], args.lookahead, args.keep, args.least, generator)
            loss = loss_by_distance(all_logits(draft, ids[rows], *chosen), target_logits[rows], *chosen, args.lookahead)
            step(loss, draft, *parts)
            progress.update()
        progress.set_postfix(kl=f"{loss.item():.3f}")


@torch.no_grad()
def acceptance_by_position(target, parallel, autoregressive, held_out: torch.Tensor, lookahead: int) -> dict:
    """
    Returns, along text that the target continues from held-out prompts, the chance that each token of a speculation is
    accepted if those before it were, at temperatures 0 and 1.
    """
    result = {}
    for temperature in (0, 1):
        ids = write_with_target(target, held_out[:32, :64], 128, do_sample=temperature == 1)
        p = target(input_ids=ids, use_cache=False).logits
        everything = drop_mask_tokens(ids.shape[1], lookahead, 1.0, 1.0, torch.Generator())
        of_parallel = all_logits(parallel, ids, *everything)
        of_autoregressive = autoregressive(input_ids=ids, use_cache=False).logits[:, everything[0] + everything[1]]
        starts = range(64, ids.shape[1] - lookahead)
        for name, q in (("parallel", of_parallel), ("autoregressive", of_autoregressive)):
            accepted = []
            for d in range(lookahead):
                at = (everything[1] == d) & (everything[0] >= starts[0]) & (everything[0] < starts[-1])
                theirs, ours = p[:, everything[0][at] + d], q[:, at]
                if temperature:
                    accepted.append(torch.minimum(theirs.softmax(-1), ours.softmax(-1)).sum(-1))
                else:
                    accepted.append((theirs.argmax(-1) == ours.argmax(-1)).float())
            reached = torch.stack(accepted).cumprod(0).mean((1, 2))
            before = torch.cat([torch.ones(1), reached[:-1]])
            rates = [round(rate, 3) for rate in (reached / before.clamp(min=1e-9)).tolist()]
            result[f"{name}_temperature_{temperature}"] = rates
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("parallel_draft"))
    parser.add_argument("--target", default=str(PAIR / "target"))
    parser.add_argument("--draft", default=str(PAIR / "draft"))
    parser.add_argument("--layers", type=int, default=4, help="those that the draft lacks begin as the target's")
    parser.add_argument("--lookahead", type=int, default=5, help="tokens that the draft learns to guess ahead")
    parser.add_argument("--keep", type=float, default=0.7, help="share of mask tokens that stay, by distance")
    parser.add_argument("--least", type=float, default=0.2, help="least share that stays")
    parser.add_argument("--rounds", type=int, default=30, help="texts that the target writes, 48 of 160 tokens each")
    parser.add_argument("--steps-per-text", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--max-files", type=int, help="read no more files than this, for a trial")
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(args.seed)
    start = time.perf_counter()

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    texts, held_out_texts = read_standard_library(args.max_files)
    windows, held_out = (pack(some, tokenizer, 256) for some in (texts, held_out_texts))
    target, autoregressive, draft = (
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (args.target, args.draft, args.draft)
    )
    draft = with_mask_token(with_layers(draft, target, args.layers))
    train(target, draft, windows, args)
    draft.to(torch.bfloat16).float().eval()  # as it is saved
    report = {
        "parameters": draft.num_parameters(),
        "minutes": minutes_since(start),
        "threads": args.num_threads,
        "acceptance_by_position": acceptance_by_position(target, draft, autoregressive, held_out, args.lookahead),
    }
    draft.to(torch.bfloat16).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    (args.output / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
