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
from pathlib import Path

import torch
from torch.nn import functional as F
from train_pair import prompts_of, read_text
from training import acceptance_on_prompts, chance_by_position, checkpoints_of, own_text, train, write_with
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


def train_parallel(target, draft, windows: torch.Tensor, args) -> None:
    """The draft learns from texts that the target writes, half of them greedily."""
    texts = own_text(target, windows, args.steps_per_text, args.seed)

    def loss_of(step):
        ids, target_logits = texts(step)
        generator = torch.Generator().manual_seed(args.seed + step)
        chosen = drop_mask_tokens(ids.shape[1], args.lookahead, args.keep, args.least, generator)
        return loss_by_distance(all_logits(draft, ids, *chosen), target_logits, *chosen, args.lookahead)

    train(draft, loss_of, args.steps, args.learning_rate, args.checkpoints / "parallel_draft.pt", "parallel draft")


@torch.no_grad()
def acceptance_by_position(target, autoregressive, parallel, prompts, lookahead: int, temperature: int) -> dict:
    """
    Returns, along text of 128 tokens that the target writes behind each prompt, the chance that each token of a
    speculation is accepted if those before it were, for both drafts.
    """
    torch.manual_seed(0)
    ids, first = write_with(target, prompts, 128, do_sample=temperature == 1), prompts.shape[1]
    p = target(input_ids=ids, use_cache=False).logits
    everything = drop_mask_tokens(ids.shape[1], lookahead, 1.0, 1.0, torch.Generator())
    of_parallel = all_logits(parallel, ids, *everything)
    of_autoregressive = autoregressive(input_ids=ids, use_cache=False).logits[:, everything[0] + everything[1]]
    rates = {}
    for name, q in (("parallel", of_parallel), ("autoregressive", of_autoregressive)):
        pairs = []
        for d in range(lookahead):
            at = (everything[1] == d) & (everything[0] >= first) & (everything[0] < ids.shape[1] - lookahead - 1)
            theirs, ours = p[:, everything[0][at] + d], q[:, at]
            pairs.append((theirs, ours))
        rates[name] = chance_by_position(pairs, temperature)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("parallel_draft"))
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints/parallel_draft"), help="to go on from")
    parser.add_argument("--target", default=str(PAIR / "target"))
    parser.add_argument("--draft", default=str(PAIR / "draft"))
    parser.add_argument("--layers", type=int, default=4, help="those that the draft lacks begin as the target's")
    parser.add_argument("--lookahead", type=int, default=5, help="tokens that the draft learns to guess ahead")
    parser.add_argument("--keep", type=float, default=0.7, help="share of mask tokens that stay, by distance")
    parser.add_argument("--least", type=float, default=0.2, help="least share that stays")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--steps-per-text", type=int, default=40, help="on one text of the target, 48 of 160 tokens")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window, which a text goes on from")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--max-files", type=int, help="read no more files than this, for a trial")
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(args.seed)

    checkpoints_of(args, ("target", "draft", "layers", "lookahead", "keep", "least", "max_files", "length", "seed"))
    windows, held_out, tokenizer = read_text(args, AutoTokenizer.from_pretrained(args.target))
    prompts = prompts_of(held_out, tokenizer, args.length)
    target, autoregressive, draft = (
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (args.target, args.draft, args.draft)
    )
    draft = with_mask_token(with_layers(draft, target, args.layers))
    train_parallel(target, draft, windows, args)
    draft.to(torch.bfloat16).float().eval()  # as it is saved
    report = {"parameters": draft.num_parameters()}
    report["acceptance_by_position"] = {
        f"{name}_temperature_{temperature}": rates
        for temperature in (0, 1)
        for name, rates in acceptance_by_position(
            target, autoregressive, draft, prompts, args.lookahead, temperature
        ).items()
    }
    report["acceptance_rate_on_prompts"] = acceptance_on_prompts(target, draft, tokenizer)
    draft.to(torch.bfloat16).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    (args.output / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
