"""How fast is it, really? `hf-ssd bench` for random pairs of any size as well, and prompts from the hub.

python examples/benchmark.py
python examples/benchmark.py --layered 287m/39m --agreement 0.85 --dtype bfloat16 --lookahead 8 --budget 12
python examples/benchmark.py --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --prompts prompts.jsonl --batch-size 4
"""

import argparse

from evaluation.prompts import check_file
from transformers.utils import logging
from workload import add_pair_and_work, batches_for, load_pair

from hf_ssd.cli.bench import add_methods, check_pictures, compare
from hf_ssd.cli.options import add_speculation


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_pair_and_work(parser)
    add_speculation(parser)
    add_methods(parser)
    args = parser.parse_args(arguments)
    try:
        check_pictures(args)
        if args.prompts:
            check_file(args.prompts)
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = parse_arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target, draft, tokenizer = load_pair(args)
    compare(args, target, draft, batches_for(args, tokenizer, target))


if __name__ == "__main__":
    main()
