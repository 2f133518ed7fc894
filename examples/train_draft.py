"""Make a draft for any causal model: its last layers learn the target's distributions on the target's own text.

    python examples/train_draft.py Qwen/Qwen3-8B --output DRAFT --prompts prompts.jsonl --minutes 240 --bfloat16
    python examples/train_draft.py TARGET --output DRAFT --prompts prompts.jsonl

1. The target answers prompts, half of them greedily. They should be like those of your users.
2. The most frequent tokens of that text become the draft's vocabulary. hf_ssd translates between the two tokenizers:
   pass both to generate(), as the commands of `hf-ssd` do by themselves.
3. The target's last layers become the draft, behind a table of the mean hidden state of each token, and learn the
   target's distributions (on-policy distillation, Agarwal et al., ICLR 2024).
4. The report has the acceptance after prompts that were held out.

Before it writes, it says how long a training of this target takes on this machine; `--minutes 0` says only that. A run
that was interrupted goes on with the same command, and `--minutes` counts the time of all of its runs.
"""

import argparse
import functools
import json
import sys
from collections import Counter
from pathlib import Path

import prompt_kinds
import torch
import training_time
from cut_draft import last_layers, mean_states
from own_texts import as_messages, block, load_tokenizer, write_texts
from small_vocabulary import small_tokenizer
from training import acceptance, acceptance_by_position, checkpoints_of, drafted_rows, train
from transformers import AutoModelForCausalLM

from hf_ssd import devices
from hf_ssd.cli.prompts import prompts_from
from hf_ssd.generation.tokenizers import translation_between

HELD_OUT = 6  # prompts of a kind


def read_prompts(args, tokenizer) -> tuple[list[str], dict[str, list[str]]]:
    """Returns the prompts to learn from, and those held out by their kinds, with the target's chat template."""
    if args.prompts:
        prompts = prompts_from(args.prompts, args.prompt_field)
        if len(prompts) < 2 * HELD_OUT:
            raise ValueError(f"{args.prompts} has {len(prompts)} prompts; at least {2 * HELD_OUT} are needed.")
        prompts, held_out = prompts[HELD_OUT:], {"prompts": prompts[:HELD_OUT]}
    else:
        prompts, held_out = prompt_kinds.to_learn_from(), prompt_kinds.held_out(HELD_OUT)
    return as_messages(prompts, tokenizer), {kind: as_messages(of, tokenizer) for kind, of in held_out.items()}


class Lessons:
    """
    Texts in the draft's tokens, as it reads them when it drafts.

    Args:
        texts (`list[dict]`): The texts, as `own_texts.write` returns them.
        translation ([`~hf_ssd.drafting.vocabulary.Translation`]): From the target's tokens.
        length (`int`): Most tokens of a text; of a longer one the beginning is left out.
    """

    def __init__(self, texts: list[dict], translation, length: int):
        self.rows = []
        same = torch.tensor([pieces[0] if pieces else 0 for pieces in translation.pieces])
        for text in texts:
            pieces = [translation.pieces[i] for i in text["ids"].tolist()]
            ends = torch.tensor([len(part) for part in pieces]).cumsum(0)
            places = ends[-len(text["p"]) - 1 : -1] - 1  # the draft token before each token of the answer
            ids = torch.tensor([piece for part in pieces for piece in part])[: ends[-2]]
            cut = max(0, len(ids) - length)
            kept = places >= cut
            likely = text["likely"].long()
            p = text["p"].float() * translation.is_common[likely]
            self.rows.append((ids[cut:], (places - cut)[kept], same[likely][kept].int(), p[kept].half()))

    def batch(self, rows: list[int], device):
        """Returns ids `(rows, length)`, places as indices of its tokens, and the distributions at these places."""
        chosen = [self.rows[row] for row in rows]
        longest = max(len(ids) for ids, *_ in chosen)
        ids = torch.stack([torch.nn.functional.pad(ids, (0, longest - len(ids))) for ids, *_ in chosen])
        places = torch.cat([i * longest + places for i, (_, places, *_) in enumerate(chosen)])
        likely, p = (torch.cat([row[part] for row in chosen]) for part in (2, 3))
        return ids.to(device), places.to(device), likely.long().to(device), p.float().to(device)


def logits_at(draft, ids: torch.LongTensor, places: torch.LongTensor) -> torch.Tensor:
    """Returns the draft's logits at the places, computed nowhere else."""
    there = draft.get_output_embeddings().register_forward_pre_hook(lambda _, x: x[0].flatten(0, 1)[places][None])
    with there:
        return draft(input_ids=ids, use_cache=False).logits[0].float()


def loss_at(draft, ids: torch.LongTensor, places: torch.LongTensor, likely, p, bfloat16: bool) -> torch.Tensor:
    """Returns the cross entropy of the distributions `p` of the tokens `likely` at the places, the mean of them."""
    with torch.autocast(draft.device.type, dtype=torch.bfloat16, enabled=bfloat16):
        logits = logits_at(draft, ids, places)
    return -(p * logits.log_softmax(-1).gather(1, likely)).sum(-1).mean()


def distil(draft, lessons: Lessons, held_out: Lessons, seconds: float, args) -> int:
    """The draft learns the distributions. Returns the number of steps."""
    size, device = min(args.rows, len(lessons.rows)), draft.device
    lengths = [len(ids) for ids, *_ in lessons.rows]

    def loss_of(step):
        rows = block(list(range(len(lengths))), step, size, args.seed, key=lengths.__getitem__)
        return loss_at(draft, *lessons.batch(rows, device), args.bfloat16)

    @torch.no_grad()
    def agreement() -> str:
        same = []
        for start in range(0, len(held_out.rows), size):
            rows = range(start, min(start + size, len(held_out.rows)))
            ids, places, likely, p = held_out.batch(list(rows), device)
            best = logits_at(draft, ids, places).argmax(-1)
            same.append((best == likely[:, 0]) & (p[:, 0] > 0))
        return f"{torch.cat(same).float().mean().item():.3f}"

    path = args.checkpoints / f"draft-{args.layers}-{args.vocab_size}.pt"
    return train(draft, loss_of, 10**6, args.learning_rate, path, "draft", 100, seconds, agreement)


def time_needed(target, tokenizer, prompts: list[str], args) -> str:
    """
    Measures how fast the target writes and a draft learns, and returns how long a training takes.

    Raises:
        `ValueError`: no draft can be cut out of the target.
    """
    draft = last_layers(target, args.layers, list(range(min(args.vocab_size, len(tokenizer))))).to(target.device)
    print("Measuring how fast the target writes and a draft learns ...", file=sys.stderr)
    tokens = training_time.tokens_per_second(target, tokenizer, prompts, args)
    steps = training_time.steps_per_second(draft, functools.partial(loss_at, bfloat16=args.bfloat16), args)
    return training_time.estimate(tokens, steps, args.minutes, args.writing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", metavar="TARGET", help="hub id or folder of the model that needs a draft")
    parser.add_argument("--output", type=Path, required=True, metavar="DRAFT", help="the folder to write")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints/draft"), help="to go on from")
    parser.add_argument("--minutes", type=float, default=120.0, help="of writing and learning, in all runs (120); "
                        "0 says how long a training takes")  # fmt: skip
    parser.add_argument("--writing", type=float, default=0.5, help="share of the minutes in which the target writes")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompts", help="JSON lines with prompts as your users write them")
    prompts.add_argument("--repository-prompts", action="store_true",
                         help="questions, changes of code and summaries that are made of this repository")  # fmt: skip
    parser.add_argument("--prompt-field", default="prompt")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the half of the answers that are drawn")
    parser.add_argument("--batch-size", type=int, default=64, help="answers that the target writes at once")
    parser.add_argument("--layers", type=int, default=4, help="the target's last ones (4)")
    parser.add_argument("--vocab-size", type=int, default=6144, help="most tokens of the draft (6144)")
    parser.add_argument("--rows", type=int, default=8, help="texts of a step")
    parser.add_argument("--length", type=int, default=384, help="most tokens of a text from which the draft learns")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--bfloat16", action="store_true", help="matrix products, for devices that have them")
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(args.seed)
    if args.minutes:
        checkpoints_of(args, ("target", "prompts", "max_new_tokens", "temperature", "batch_size", "seed"))

    # 1. The target writes.
    tokenizer = load_tokenizer(args.target)
    prompts, held_out = read_prompts(args, tokenizer)
    device = (devices.accelerators() or [torch.device("cpu")])[0]
    dtype = torch.bfloat16 if args.bfloat16 else torch.float32
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(device).eval()
    small_tokenizer(tokenizer, Counter(), args.vocab_size)  # raises before the target writes for an hour
    print(time_needed(target, tokenizer, prompts, args), file=sys.stderr)
    if not args.minutes:
        return
    seconds = {"writing": 60 * args.minutes * args.writing, "learning": 60 * args.minutes * (1 - args.writing)}
    answered = [prompt for of in held_out.values() for prompt in of]
    folder = args.checkpoints / "texts"
    texts, unseen = write_texts(target, tokenizer, prompts, answered, folder, seconds["writing"], args)

    # 2. The vocabulary.
    counts = Counter(i for text in texts for i in text["ids"].tolist())
    kept = args.checkpoints / f"vocabulary-{args.vocab_size}"  # more text would change it
    if not kept.exists():
        small_tokenizer(tokenizer, counts, args.vocab_size).save_pretrained(kept)
    small = load_tokenizer(str(kept))
    size = target.config.get_text_config(decoder=True).vocab_size
    translation = translation_between(tokenizer, small, size, len(small))

    # 3. The draft learns.
    kept_ids = tokenizer.convert_tokens_to_ids(small.convert_ids_to_tokens(range(len(small))))
    draft = last_layers(target, args.layers, kept_ids)
    table = mean_states(target, args.layers, kept_ids, [text["ids"] for text in texts])
    draft.get_input_embeddings().load_state_dict({"weight": table})
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(draft.config, name, getattr(small, name))
        setattr(draft.generation_config, name, getattr(small, name))
    draft.to(device)
    lessons, unseen = (Lessons(of, translation, args.length) for of in (texts, unseen))
    steps = distil(draft, lessons, unseen, seconds["learning"], args)
    draft.to(torch.bfloat16).save_pretrained(args.output)
    small.save_pretrained(args.output)

    # 4. What it is worth.
    draft.float().eval()
    written = sum(len(text["p"]) for text in texts)
    covered = sum(counts[i] for i in counts if translation.is_common[i]) / counts.total()
    report = {"parameters": draft.num_parameters(), "minutes": args.minutes, "texts": len(texts)}
    report |= {"tokens_written": written, "vocabulary_covers": round(covered, 3), "steps": steps, "acceptance": {}}
    for kind, of in held_out.items():
        for temperature in (0.0, 0.7):
            rows = drafted_rows(target, draft, tokenizer, of, temperature, small)
            figures = {"rate": acceptance(rows), "by_position": acceptance_by_position(rows)}
            report["acceptance"][f"{kind}, temperature {temperature:g}"] = figures
    (args.output / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
