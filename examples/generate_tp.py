"""A target that several devices share, and one or several draft workers, in one command.

    torchrun --nproc-per-node 3 examples/generate_tp.py
    torchrun --nproc-per-node 5 examples/generate_tp.py --target Qwen/Qwen3-32B --draft Qwen/Qwen3-0.6B

The last ranks draft (`--num-draft-ranks`), the others share the target by transformers' tensor parallelism. With two
ranks the target is not divided. Without options it runs the small pair in `examples/pair`, which completes Python code.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, set_seed
from transformers.utils import logging

import hf_ssd

PAIR = Path(__file__).parent / "pair"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default=str(PAIR / "target"), help="hub id or folder of the large model")
    parser.add_argument("--draft", default=str(PAIR / "draft"), help="hub id or folder of the small model")
    parser.add_argument("--num-draft-ranks", type=int, default=1)
    parser.add_argument("--prompt", default="class Reader:\n    def __init__(self, path):\n")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--lookahead", type=int, help="default: planned while it generates")
    parser.add_argument("--budget", type=int, help="of each draft rank; default: planned while it generates")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    roles = hf_ssd.distributed.init_roles(args.num_draft_ranks)
    dtype = torch.bfloat16 if torch.accelerator.is_available() else torch.float32
    if roles.is_draft:
        roles.serve(args.draft, dtype=dtype)
        return

    division = roles.target_config(args.target)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype, distributed_config=division)
    target = hf_ssd.enable(model.to(roles.device).eval())
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    inputs = tokenizer(args.prompt, return_tensors="pt", return_token_type_ids=False).to(roles.device)
    options = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    set_seed(0)
    output = target.generate(
        **inputs,
        **options,
        max_new_tokens=args.max_new_tokens,
        assistant_model=roles.draft,
        ssd_config=hf_ssd.SSDConfig(lookahead=args.lookahead or "auto", budget=args.budget or "auto"),
        streamer=TextStreamer(tokenizer) if roles.is_leader else None,
        return_dict_in_generate=True,
    )
    if roles.is_leader:
        print(f"\n{roles.tp_size} target ranks, {roles.num_draft_ranks} draft ranks\n{output.ssd_stats}")
    roles.shutdown()


if __name__ == "__main__":
    main()
