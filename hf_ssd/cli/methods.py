"""Ways to generate, run side by side: plain generate(), assisted generation, speculative decoding and SSD."""

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from tqdm.auto import tqdm
from transformers import StoppingCriteria, StoppingCriteriaList, set_seed

import hf_ssd

from ..config import WITHOUT_DRAFT
from ..distributed.cores import CoreShare, use_cores
from ..drafting.heads.base import Head
from ..rounds import EARLY
from .options import settings

PLAIN, ASSISTED, SD, SSD = "plain generate", "assisted", "SSD, in turn", "SSD"


NO_SPEED = "the answers end with their first tokens, so no speed is known; ask for longer ones"


class NotMeasured(ValueError):
    """Models work, but their speed is not known. The message says why and what to do."""


class FirstToken(StoppingCriteria):
    """Records the time and the length of the text when the first token comes, which may bring others with it."""

    at, length = None, 0

    def __call__(self, input_ids, scores, **kwargs):
        if self.at is None:
            input_ids[0, -1].item()  # waits until a GPU has computed the token
            self.at, self.length = time.perf_counter(), input_ids.shape[1]
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@dataclass
class Method:
    options: dict  # of generate()
    cores: tuple[int, ...] | None  # of this process, if the target is on the CPU
    devices: int  # in use, counting cores on the CPU
    settings: dict = field(default_factory=dict)  # of the draft's generation config, for transformers' own assistant
    runs: list["Run"] = field(default_factory=list)


@dataclass
class Run:
    tokens: int  # new tokens of all rows
    first: int  # of them, those that were there after `prefill`
    prefill: float  # seconds until the first tokens
    seconds: float  # of the whole call
    stats: object  # [`~hf_ssd.SSDStats`], if the method has an `ssd_config`
    sequences: torch.LongTensor  # the output

    @property
    def speed(self) -> float:
        """Tokens per second while decoding."""
        return (self.tokens - self.first) / (self.seconds - self.prefill)


class Bench:
    """Runs methods of generation with a target, a draft, the draft's worker, and batches that are used in turn."""

    deadline, calls = math.inf, 0  # a `time.perf_counter()` value, and how many calls are to end before it

    def __init__(self, args, target, draft, assistant, batches: list[dict], tokenizers: dict | None = None):
        self.args, self.target, self.draft, self.assistant, self.batches = args, target, draft, assistant, batches
        self.tokenizers, lengths = tokenizers or {}, {"max_new_tokens": args.max_new_tokens}
        self.options = {**lengths, **sampling(args.temperature), "return_dict_in_generate": True}
        if args.ignore_eos:
            self.options["min_new_tokens"] = args.max_new_tokens

    def methods(self, cores: CoreShare | None, all_devices: bool) -> dict[str, Method]:
        """Returns the methods to compare. With `all_devices` the other methods have all cores that SSD has."""
        target_cores = cores and cores.target
        theirs = cores.all if cores and all_devices else target_cores
        devices = len(theirs) if theirs else 1
        methods = {PLAIN: Method({}, theirs, devices)}
        config = settings(self.args)
        ours = {"assistant_model": self.assistant, "ssd_config": config}
        if config.drafter in WITHOUT_DRAFT:  # transformers looks prompts up too, for one row
            lookups = self.args.assistant_tokens if self.args.batch_size == 1 and config.drafter == EARLY else ()
            named = {f"{ASSISTED}, {n}": Method({"prompt_lookup_num_tokens": n}, theirs, devices) for n in lookups}
            return methods | named | {SSD: Method(ours, theirs, devices)}
        # transformers' assisted generation takes no batches, and no heads.
        if self.args.batch_size == 1 and not isinstance(self.draft, Head):
            methods[f"{ASSISTED}, default"] = Method({"assistant_model": self.draft}, theirs, devices)
            for n in self.args.assistant_tokens:
                constant = {"num_assistant_tokens": n, "num_assistant_tokens_schedule": "constant"}
                constant["assistant_confidence_threshold"] = 0.0
                methods[f"{ASSISTED}, {n}"] = Method({"assistant_model": self.draft}, theirs, devices, constant)
        for k in self.args.in_turn_lookaheads:
            config = hf_ssd.SSDConfig(lookahead=k, asynchronous=False)
            methods[f"{SD}, {k}"] = Method({"assistant_model": self.draft, "ssd_config": config}, theirs, devices)
        return methods | {SSD: Method(ours, target_cores, len(cores.all) if cores else 2)}

    def longest(self) -> float | None:
        """Returns the seconds that the next call may take, `None` without a deadline, and counts the call."""
        if not self.calls:
            return None
        left = max(0.0, self.deadline - time.perf_counter())
        self.calls -= 1
        return min(left, 1.5 * left / (self.calls + 1))  # some calls take longer than others

    def run(self, method: Method, turn: int) -> Run:
        inputs = self.batches[turn % len(self.batches)]
        options, first = {**self.options, **method.options, "max_time": self.longest()}, FirstToken()
        if "assistant_model" in options:
            options |= self.tokenizers
        if "ssd_config" not in options:  # SSD reports the prefill in its statistics
            options["stopping_criteria"] = StoppingCriteriaList([first])
        set_seed(turn)
        kept = {name: getattr(self.draft.generation_config, name, None) for name in method.settings}
        if kept:
            self.draft.generation_config.update(**method.settings)
        try:
            with use_cores(method.cores):
                synchronize(self.target.device)
                start = time.perf_counter()
                output = self.target.generate(**inputs, **options)
                synchronize(self.target.device)
                seconds = time.perf_counter() - start
        finally:
            if kept:
                self.draft.generation_config.update(**kept)
        rows, length = inputs["input_ids"].shape
        if stats := getattr(output, "ssd_stats", None):
            return Run(stats.generated_tokens, rows, stats.prefill_seconds, seconds, stats, output.sequences)
        tokens = new_tokens(output.sequences[:, length:], self.target)
        return Run(tokens, rows * (first.length - length), first.at - start, seconds, None, output.sequences)

    def measure(self, methods: dict[str, Method], warm_ups: int = 1) -> dict[str, Method]:
        """Runs the methods in turns until the deadline, adds the runs to them, and returns those that take the pair."""
        turns = tqdm(range(self.args.repeats + warm_ups), desc="measuring", unit="turn", disable=None)
        for turn in turns:
            if turn > warm_ups and time.perf_counter() > self.deadline:
                break
            runs = {}
            for name, method in list(methods.items()):
                if turns.disable:  # stderr is no terminal
                    print(f"turn {turn + 1} of at most {turns.total}: {name}", file=sys.stderr, flush=True)
                turns.set_postfix_str(name)
                try:
                    runs[name] = self.run(method, turn)
                # An IndexError if the draft has fewer positions than the text; an AttributeError of transformers if a
                # draft with another tokenizer samples.
                except (ValueError, IndexError, AttributeError):
                    if not name.startswith(ASSISTED):
                        raise
                    del methods[name]
            # A turn counts if each answer in it went on after its first tokens.
            if turn >= warm_ups and all(run.tokens > run.first for run in runs.values()):
                for name, run in runs.items():
                    methods[name].runs.append(run)
        if not methods[PLAIN].runs:
            raise NotMeasured(NO_SPEED)
        return methods


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@torch.no_grad()
def time_of(step: Callable, device: torch.device, *inputs, **options) -> float:
    """Returns the median seconds of seven calls that compute on a device."""
    times = []
    for _ in range(7):
        synchronize(device)
        start = time.perf_counter()
        step(*inputs, **options)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def sampling(temperature: float) -> dict:
    """Returns options of generate(): greedy at 0, otherwise the temperature alone, without the model's own filters."""
    if not temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def new_tokens(tokens: torch.LongTensor, model) -> int:
    """Counts the tokens of a batch up to the end of each text."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        return tokens.numel()
    is_end = torch.isin(tokens, torch.tensor(ends, device=tokens.device))
    before = is_end.cumsum(dim=1) - is_end.long()
    return int((before == 0).sum())
