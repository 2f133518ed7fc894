"""Where does a round go? Each millisecond of target and draft, next to what their forward passes alone cost.

python examples/profile_round.py --layered 287m/39m --agreement 0.85 --dtype bfloat16 --lookahead 7 --budget 12
python examples/profile_round.py --draft examples/pair/parallel_draft --lookahead 5 --budget 8
"""

import argparse
import statistics
import time

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.utils import logging
from workload import add_pair_and_work, batches_for, load_pair

import hf_ssd
from hf_ssd.cache.cache_name import CACHE
from hf_ssd.cli.bench import cores_for
from hf_ssd.cli.methods import synchronize
from hf_ssd.cli.options import core_numbers
from hf_ssd.distributed.cores import use_cores
from hf_ssd.drafting.draft_info import DraftInfo
from hf_ssd.drafting.drafters import drafter_kind
from hf_ssd.drafting.drafts import Drafts
from hf_ssd.drafting.request import SessionRequest
from hf_ssd.rounds import AHEAD, Outcome, Plan

REPEATS = 20


def duration_of(step, device: torch.device) -> float:
    """Returns how long a step takes, and what it launched on a device, in seconds."""
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


@torch.inference_mode()
def forward_ms(model, prompt: torch.LongTensor, tokens: int) -> float:
    """A forward pass over so many tokens behind a prompt, with transformers' own cache."""
    cache = DynamicCache(config=model.config)
    model(prompt, **{CACHE: cache})
    new = prompt[:, :1].expand(-1, tokens).contiguous()

    def step():
        model(new, **{CACHE: cache})
        cache.crop(-tokens)

    return 1e3 * statistics.median(duration_of(step, model.device) for _ in range(REPEATS))


@torch.inference_mode()
def drafting(draft, prompt: torch.LongTensor, config):
    """Returns two functions to be called in turn, without anyone else at work: what answers on a hit, what prepares."""
    settings = GenerationConfig(do_sample=False, max_length=prompt.shape[1] + 1000)
    vocab_size = draft.config.get_text_config(decoder=True).vocab_size
    speculator = Drafts().speculator(draft, SessionRequest(config, settings, list(prompt), 0, vocab_size))
    plan = Plan(AHEAD, config.lookahead, config.lookahead, config.budget)
    speculator.drafter.begin()
    speculator.prepare(plan)

    def answer():
        prepared = speculator.prepared
        accepted, bonus = ([row[0] for row in numbers] for numbers in (prepared.accepted, prepared.bonus))
        speculator.answer(Outcome.of(speculator.verified, accepted, bonus), plan)

    return answer, lambda: speculator.prepare(plan)


@torch.inference_mode()
def draft_ms(draft, prompt: torch.LongTensor, config) -> tuple[float, float]:
    """Answering on a hit, and preparing."""
    answer, prepare = drafting(draft, prompt, config)
    times = [[duration_of(step, draft.device) for step in (answer, prepare)] for _ in range(REPEATS)]
    answers, preparations = zip(*times)
    return 1e3 * statistics.median(answers), 1e3 * statistics.median(preparations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_pair_and_work(parser)
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--budget", type=int, default=8)
    parser.add_argument("--pin", nargs=2, type=core_numbers, help="cores of each side, as in 0,1,2 3")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target, draft, tokenizer = load_pair(args)
    inputs = batches_for(args, tokenizer, target)[0]
    prompt, cores = inputs["input_ids"], cores_for(args, target, draft)
    k, config = args.lookahead, hf_ssd.SSDConfig(lookahead=args.lookahead, budget=args.budget)
    parallel = drafter_kind(config, DraftInfo.of(draft.config)).one_pass

    with use_cores(cores and cores.target):
        one, verification = forward_ms(target, prompt, 1), forward_ms(target, prompt, k + 1)
    with use_cores(cores and cores.drafts[0]):
        feed, branch = forward_ms(draft, prompt, k + 1), forward_ms(draft, prompt, args.budget)
        at_once = forward_ms(draft, prompt, (k + 1) * (args.budget + 1))
        answer, preparation = draft_ms(draft, prompt, config)
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
    with hf_ssd.launch_draft(draft, cores=cores) as assistant:
        for _ in range(2):  # the first call warms up
            output = target.generate(**inputs, **options, assistant_model=assistant, ssd_config=config)
    stats = output.ssd_stats
    whole = [record for record in stats.records if record.lookahead == k]
    hits = [record for record in whole if record.is_hit]
    verify = 1e3 * statistics.median(record.verify_seconds for record in whole)
    wait = 1e3 * statistics.median(record.wait_seconds for record in hits) if hits else float("nan")
    decoding = stats.total_seconds - stats.prefill_seconds
    rest = 1e3 * (decoding - sum(stats.column("verify_seconds")) - sum(stats.column("wait_seconds"))) / stats.rounds
    forwards = at_once if parallel else feed + k * branch
    passes = 1 if parallel else k + 1
    print(f"lookahead {k}, budget {args.budget}, batch size {args.batch_size}; medians in ms")
    lines = {
        "target: forward of 1 token, alone": one,
        f"target: forward of {k + 1} tokens, alone": verification,
        "target: verification in a round, the draft at work": verify,
        "target: wait on a hit": wait,
        "target: everything else of a round (mean)": rest,
        f"draft: forward of {k + 1} tokens, alone": feed,
        f"draft: forward of {args.budget} branches, alone": branch,
        f"draft: to prepare, alone (forward passes: {passes})": preparation,
        "draft: to prepare, without the forward passes": preparation - forwards,
        "draft: to answer on a hit, alone": answer,
        "draft: to prepare in a round, the target at work": 1e3
        * statistics.median(record.choose_seconds + record.grow_seconds for record in whole),
    }
    for name, value in lines.items():
        print(f"{name:<54} {value:8.2f}")


if __name__ == "__main__":
    main()
