"""How long does the second turn of a chat take, if the first one is read again and if it is kept?

    python examples/second_turn.py
    python examples/second_turn.py folder/target folder/draft --tokens 2000 --repeats 5

The first turn is a text of so many tokens, and the second one continues it and its answer with a short question. Both
ways take turns, each time with another text. Printed are medians of the seconds until the first token of the second
answer and until its last one, and how many tokens of the second prompt were not read again.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_ssd

PAIR = Path(__file__).parent / "pair"
QUESTION = "\n\n# Now the same in fewer lines:\n"
WAYS = {"read again": 0, "kept": "auto"}


def answer(manager, ids: torch.LongTensor, tokens: int) -> tuple[torch.LongTensor, float, float, int]:
    """Returns the text with its answer, seconds until the first and the last token, and tokens that were known."""
    begun, before = time.perf_counter(), manager.rows.kept.hits
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "streaming": True}
    name = manager.add_request(ids, attention_mask=torch.ones_like(ids), **options)
    outputs = manager.request_id_iter(name)
    next(outputs)
    first = time.perf_counter() - begun
    *_, last = outputs
    text = torch.tensor([last.prompt_ids + last.generated_tokens])
    return text, first, time.perf_counter() - begun, manager.rows.kept.hits - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default=str(PAIR / "target"), help="default: the small pair")
    parser.add_argument("draft", nargs="?", help="default: the small pair's; n-grams for another target")
    parser.add_argument("--tokens", type=int, default=1500, help="of the first turn's prompt")
    parser.add_argument("--answer", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    draft = args.draft or (str(PAIR / "draft") if args.target == str(PAIR / "target") else None)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype="float32")
    config = None if draft else hf_ssd.SSDConfig(drafter="ngram")
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    text = tokenizer(Path(argparse.__file__).read_text(), return_tensors="pt")["input_ids"]
    question = tokenizer(QUESTION, add_special_tokens=False, return_tensors="pt")["input_ids"]
    found = {way: [] for way in WAYS}
    for repeat in tqdm(range(args.repeats), desc="turns of both ways"):
        ids = text[:, repeat * args.tokens % (text.shape[1] - args.tokens) :][:, : args.tokens]
        for way, keep in WAYS.items():
            with hf_ssd.continuous_batching(target, draft, config, keep_prefixes=keep) as manager:
                first_turn = answer(manager, ids, args.answer)[0]
                found[way].append(answer(manager, torch.cat([first_turn, question], dim=1), args.answer)[1:])
    print(f"| the first turn, of {args.tokens} tokens, is | first token, s | last token, s | tokens not read |")
    print("| --- | --- | --- | --- |")
    medians = {way: list(map(statistics.median, zip(*values))) for way, values in found.items()}
    for way, (first, last, known) in medians.items():
        print(f"| {way} | {first:.3f} | {last:.3f} | {known:.0f} |")
    first, last = (one / other for one, other in zip(medians["read again"][:2], medians["kept"][:2]))
    print(f"Kept, the first token comes {first:.1f} times and the last token {last:.1f} times as fast.")


if __name__ == "__main__":
    main()
