"""How fast are the methods on real prompts, and are the answers as good? Evaluates on datasets, and can be continued.

    python examples/evaluate_datasets.py --dataset humaneval gsm8k --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B
    python examples/evaluate_datasets.py --dataset prompts.jsonl --prompt-field text --max-new-tokens 64
    python examples/evaluate_datasets.py --dataset gsm8k=test.parquet --methods plain ssd
    torchrun --nproc-per-node 5 examples/evaluate_datasets.py --dataset gsm8k --target Qwen/Qwen3-32B

A dataset is a name, a file, or name=file for a local copy of a named one. Without models the small pair in
`examples/pair` answers. Plain generate() is AR in the table, ordinary speculative decoding SD. They take turns, batch
by batch, so that what else the machine does falls on all alike. The target has the same device in every row, and
SSD one more for its draft, as in the paper. Run the same command again to go on after an interruption.
"""

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from evaluation import report
from evaluation.prompts import SOURCES, Batch, find_source, load_samples
from evaluation.results_file import ResultsFile
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, StoppingCriteriaList, set_seed
from transformers.utils import logging
from workload import add_models

import hf_ssd
from hf_ssd import devices
from hf_ssd.cli.bench import about
from hf_ssd.cli.methods import FirstToken, sampling
from hf_ssd.distributed.cores import divide_cores, use_cores

METHODS = ("plain", "assisted", "sd", "ssd")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    data = parser.add_argument_group("prompts")
    data.add_argument("--dataset", nargs="+", required=True, help=f"{', '.join(SOURCES)}, a file, or name=file")
    data.add_argument("--prompt-field", default="prompt", help="column of the prompts in a file")
    data.add_argument("--num-samples", type=int, default=128, help="of each dataset, the first ones that fit")
    data.add_argument("--max-new-tokens", type=int, default=512)
    data.add_argument("--batch-size", type=int, default=1)
    data.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    add_models(parser).add_argument("--num-draft-ranks", type=int, default=1, help="under torchrun")
    method = parser.add_argument_group("methods")
    method.add_argument("--methods", nargs="+", choices=METHODS, help="default: all that can run here")
    method.add_argument("--lookahead", type=int, help="of SD and SSD; default: planned while it generates")
    method.add_argument("--budget", type=int, help="of SSD; default: planned while it generates")
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, default=Path("evaluation_results"), help="folder")
    output.add_argument("--execute-code", action="store_true", help="run the programs that answer humaneval")
    return parser.parse_args()


# ---------------------------------------------------------------- what is to be done


class Evaluation:
    """
    The files: prompts that come in, results that go out. Only the leader has one.

    Args:
        args (`argparse.Namespace`): Of the command line.
        tokenizer (`PreTrainedTokenizerBase`): Of the target.
        is_launched (`bool`): By torchrun.

    Raises:
        `ValueError`: the arguments cannot work, or the results were begun with others.
    """

    def __init__(self, args, tokenizer, is_launched: bool):
        self.args = args
        self.methods = choose_methods(args, is_launched)
        sources = [find_source(given, args.prompt_field) for given in args.dataset]
        self.names, self.metrics = [name for name, _, _ in sources], [source.metric for _, source, _ in sources]
        if len({*self.names, report.ALL}) <= len(self.names):
            raise ValueError(f"Datasets must have names of their own, other than {report.ALL!r}: {self.names}.")
        unrecorded = ("output", "execute_code")  # they change no run
        arguments = {name: value for name, value in vars(args).items() if name not in unrecorded}
        arguments |= {"methods": self.methods, "ranks": int(os.environ["WORLD_SIZE"]) if is_launched else 1}
        self.results = ResultsFile(args.output / "results.jsonl", arguments, about())

        config = AutoConfig.from_pretrained(args.target).get_text_config(decoder=True)
        room = getattr(config, "max_position_embeddings", None) or sys.maxsize

        def fits(prompt: str) -> bool:
            return encode(tokenizer, [prompt])["input_ids"].shape[1] + args.max_new_tokens <= room

        load = [load_samples(given, args.prompt_field, args.num_samples, fits) for given in args.dataset]
        self.samples = dict(zip(self.names, load))

    def work(self) -> tuple[list[str], list[Batch]]:
        """Returns the methods and batches that are not done yet."""
        batches = []
        for name, samples in self.samples.items():
            for index, start in enumerate(range(0, len(samples), self.args.batch_size)):
                prompts = [sample.prompt for sample in samples[start : start + self.args.batch_size]]
                methods = [method for method in self.methods if not self.results.has(name, index, method)]
                if methods:
                    batches.append(Batch(name, index, prompts, methods))
        left = {method for batch in batches for method in batch.methods}
        return [method for method in self.methods if method in left], batches

    def report(self) -> None:
        """Prints a table and writes it, with a figure."""
        args, runs = self.args, self.results.runs
        rows = report.rows_of(runs, self.names, self.methods)
        qualities = {}
        for name, metric in zip(self.names, self.metrics):
            references = [sample.reference for sample in self.samples[name]]
            if metric is None or references[0] is None or (metric == "pass_at_1" and not args.execute_code):
                continue
            of = {method: [r for r in runs if (r["dataset"], r["method"]) == (name, method)] for method in self.methods}
            values = {m: report.quality(of[m], references, metric, args.execute_code) for m in self.methods}
            qualities[name] = (metric, values)
        text = report.markdown(rows, self.methods, args.temperature > 0, qualities)
        settings = f"batch size {args.batch_size}, temperature {args.temperature:g}, up to {args.max_new_tokens} tokens"
        names = [Path(name).name if Path(name).is_dir() else name for name in (args.target, args.draft)]
        text = f"{names[0]} with {names[1]}: {settings}, without the prefill\n\n{text}"
        (args.output / "results.md").write_text(text, encoding="utf-8")
        report.draw(rows, self.methods, args.output / "results.png")
        print(f"\n{text}", end="")
        if "pass_at_1" in self.metrics and not args.execute_code:
            print("\npass_at_1 was left out: it runs the programs that the models wrote, with --execute-code.")


def choose_methods(args, is_launched: bool) -> list[str]:
    """
    Returns the methods that can run, and says which one cannot.

    Raises:
        `ValueError`: one that was asked for cannot, or the settings make no sense.
    """
    for name in ("num_samples", "max_new_tokens", "batch_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"`--{name.replace('_', '-')}` is {getattr(args, name)}, but must be at least 1.")
    if args.temperature < 0:
        raise ValueError(f"`--temperature` is {args.temperature:g}, but must be 0 (greedy) or more.")
    ssd_config(args, asynchronous=True)
    methods = [method for method in METHODS if args.methods is None or method in args.methods]
    if is_launched:
        if {"assisted", "sd"} & {*(args.methods or ())}:
            raise ValueError(
                "Under torchrun the draft is not in the target's process, which assisted and sd need; "
                "choose --methods plain ssd."
            )
        return [method for method in methods if method in ("plain", "ssd")]
    if args.batch_size > 1 and "assisted" in methods:
        print("Transformers' assisted generation is left out: it takes no batches, only --batch-size 1.")
        methods.remove("assisted")
        if not methods:
            raise ValueError("No method is left; choose others with --methods.")
    return methods


def ssd_config(args, asynchronous: bool) -> hf_ssd.SSDConfig:
    # Plain decoding instead of a draft that has died would be measured as SSD, so it stops; it can be continued.
    settings = {"asynchronous": asynchronous, "on_draft_failure": "raise"}
    lookahead, budget = ("auto" if value is None else value for value in (args.lookahead, args.budget))
    return hf_ssd.SSDConfig(lookahead=lookahead, budget=budget, **settings)


# ---------------------------------------------------------------- the runs


def encode(tokenizer, prompts: list[str]):
    """Returns the inputs of generate(), with the chat template where there is one."""
    has_template = tokenizer.chat_template is not None
    if has_template:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    options = {"padding": True, "return_tensors": "pt", "return_token_type_ids": False}
    return tokenizer(prompts, add_special_tokens=not has_template, **options)  # a template has its own


def until_end(row: list[int], ends: list[int]) -> list[int]:
    """Returns the tokens up to the end of the text, that one included."""
    return row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))]


class Runner:
    """
    Args:
        args (`argparse.Namespace`): Of the command line.
        target (`PreTrainedModel`): Enabled.
        tokenizer (`PreTrainedTokenizerBase`): Of the target.
        methods (`dict[str, dict]`): What generate() is given for each method.
        cores (`tuple[int, ...]`, *optional*): Of this process, if the target is on the CPU.
    """

    def __init__(self, args, target, tokenizer, methods: dict[str, dict], cores: tuple[int, ...] | None):
        self.target, self.tokenizer, self.methods, self.cores = target, tokenizer, methods, cores
        self.options = {"max_new_tokens": args.max_new_tokens, "return_dict_in_generate": True}
        self.options |= sampling(args.temperature)

    def run(self, batch: Batch, method: str) -> dict:
        """Returns a line of results.jsonl."""
        inputs = encode(self.tokenizer, batch.prompts).to(self.target.device)
        options, first = {**self.options, **self.methods[method]}, FirstToken()
        if "ssd_config" not in options:  # ours say it themselves
            options["stopping_criteria"] = StoppingCriteriaList([first])
        set_seed(batch.index)
        with use_cores(self.cores):
            start = time.perf_counter()
            output = self.target.generate(**inputs, **options)
            new_tokens = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
            seconds = time.perf_counter() - start
        ends = self.target.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        token_ids = [until_end(row, ends) for row in new_tokens]
        stats = getattr(output, "ssd_stats", None)
        rounds = stats and {name: stats.column(name) for name in ("lookahead", "accepted", "sources")}
        return {
            "dataset": batch.dataset,
            "batch": batch.index,
            "method": method,
            "rows": len(token_ids),
            "tokens": sum(map(len, token_ids)),
            "seconds": seconds,
            "prefill": stats.prefill_seconds if stats else first.at - start,
            "acceptance": stats and stats.acceptance_rate,
            "hit_rate": stats and stats.hit_rate,
            "text": self.tokenizer.batch_decode(token_ids, skip_special_tokens=True),
            "token_ids": token_ids,
            "rounds": rounds,
        }

    def run_all(self, batches: list[Batch], results: ResultsFile | None) -> None:
        """
        Args:
            batches (`list[Batch]`): What is to be answered, and by which methods.
            results ([`ResultsFile`], *optional*): `None` on a rank that only helps.
        """
        for method in self.methods:  # the first time is slower: workers start, kernels are chosen
            self.run(batches[0], method)
        total = sum(len(batch.methods) for batch in batches)
        with tqdm(total=total, desc="evaluating", unit="run", disable=results is None) as progress:
            for batch in batches:
                for method in batch.methods:
                    progress.set_postfix_str(f"{batch.dataset}, {method}")
                    run = self.run(batch, method)
                    if results is not None:
                        results.add(run)
                    progress.update()


@contextlib.contextmanager
def load_models(args, methods: list[str], roles, division):
    """
    Yields the target, what generate() is given for each method, and the cores of this process. Without torchrun the
    target is on the first GPU and the draft on the last; without a GPU both are on the CPU.
    """
    dtype, gpus = getattr(torch, args.dtype), devices.accelerators()
    places = gpus or [torch.device("cpu")]
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype, distributed_config=division)
    target = hf_ssd.enable(model.to(roles.device if roles else places[0]).eval())
    cores = None if gpus or roles else divide_cores()
    with contextlib.ExitStack() as stack:
        draft = assistant = None
        if roles is not None:
            assistant = roles.draft
        elif methods != ["plain"]:
            draft = AutoModelForCausalLM.from_pretrained(args.draft, dtype=dtype).to(places[-1]).eval()
            if "ssd" in methods:
                assistant = stack.enter_context(hf_ssd.launch_draft(draft, cores=cores))
        options = {
            "plain": {},
            "assisted": {"assistant_model": draft},
            "sd": {"assistant_model": draft, "ssd_config": ssd_config(args, asynchronous=False)},
            "ssd": {"assistant_model": assistant, "ssd_config": ssd_config(args, asynchronous=True)},
        }
        yield target, {method: options[method] for method in methods}, cores and cores.target


def main() -> None:
    args = parse_arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    is_launched = dist.is_torchelastic_launched()
    is_leader = not is_launched or os.environ["RANK"] == "0"

    # 1. The leader alone reads and writes files; whatever cannot work is said before a model is loaded.
    try:
        for given in args.dataset:
            find_source(given, args.prompt_field)  # first: the tokenizer may come from the hub
        tokenizer = AutoTokenizer.from_pretrained(args.target, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        evaluation = Evaluation(args, tokenizer, is_launched) if is_leader else None
        roles = hf_ssd.distributed.init_roles(args.num_draft_ranks) if is_launched else None
        division = roles.target_config(args.target) if roles and not roles.is_draft else None
    except ValueError as error:
        # torchrun ends all ranks when one fails, so that one must be the rank that says why
        sys.exit(str(error) if is_leader else 0)
    if roles and roles.is_draft:
        roles.serve(args.draft, dtype=getattr(torch, args.dtype))
        return

    # 2. The runs, on all ranks of the target.
    work = [evaluation.work() if is_leader else None]
    if roles and roles.tp_size > 1:
        dist.broadcast_object_list(work, src=0, device=torch.device("cpu"))
    methods, batches = work[0]
    if batches:
        with load_models(args, methods, roles, division) as (target, options, cores):
            runner = Runner(args, target, tokenizer, options, cores)
            runner.run_all(batches, evaluation.results if is_leader else None)
    if roles:
        roles.shutdown()

    # 3. What they say.
    if is_leader:
        evaluation.report()


if __name__ == "__main__":
    main()
