"""Where does a round go? What each side computes, launches and waits for, and what separate devices would change."""

import dataclasses
import warnings
from collections import Counter
from pathlib import Path

import torch
from profile_round import draft_ms, drafting, forward_ms
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import hf_ssd
from hf_ssd import theory
from hf_ssd.cli.methods import Method, Run
from hf_ssd.cli.table import figures_of

from .clock import Clock, first_line
from .pairs import Pair, load, memory_is_freed, names_of
from .results import Report
from .speed import bench_of

LOOKAHEAD, BUDGET = 5, 8
PROFILED_TOKENS = 24  # of a call under the profiler, whose trace takes long to read
PROFILED_ROUNDS = 4  # of the draft
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "hipLaunchKernel")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "hipStreamSynchronize")
READS = ("aten::_local_scalar_dense", "aten::nonzero")  # operators whose result the host needs
SYNCHRONIZES = "called a synchronizing"  # what torch warns of


def measure(args, layout, report: Report, seconds: float) -> None:
    """Profiles a round of each pair, each in its share of the time."""
    part = report.begin("profile", {"pairs": {}})
    names = names_of(args)
    for name, share in Clock(seconds).shares(names):
        found = part["pairs"][name] = {}
        try:
            report.now(f"profile, {name}: loading")
            with memory_is_freed():
                profile_pair(load(name, args, layout), found, args, layout, report, share)
        except Exception as error:
            found["failed"] = first_line(error)
        report.save()


def profile_pair(pair: Pair, found: dict, args, layout, report: Report, clock: Clock) -> None:
    """Adds table after table; one that raises is noted, and the others remain."""
    measured = {}

    def step(title: str, action) -> None:
        if clock.is_over:
            found[title] = "dropped, the time was used up"
            return
        report.now(f"profile, {pair.name}: {title}")
        try:
            found[title] = action()
        except Exception as error:
            found[title] = f"failed: {first_line(error)}"
        report.save()

    with pair.launch() as assistant:
        call = Call(pair, assistant, args)
        step("A round in a call, ms", lambda: in_a_call(call, measured, report))
        step("Alone, ms", lambda: alone(pair, measured))
        if layout.is_shared:
            title = "PROJECTED to a device for each side, not measured (Theorem 7)"
            step(title, lambda: projection(measured["stats"], measured))
        step("The target's process, per forward pass", lambda: of_the_target(call))
        step("Where the target's process waits for its device, per call", lambda: places_that_wait(call))
    step("The draft's work, per round", lambda: of_the_draft(pair))


class Call:
    """A call of generate() with a fixed lookahead and budget."""

    def __init__(self, pair: Pair, assistant, args):
        self.config = hf_ssd.SSDConfig(lookahead=LOOKAHEAD, budget=BUDGET)
        self.bench = bench_of(pair.target, pair.draft, assistant, pair.batches(1), 0.0, 1, args)
        self.options = {"assistant_model": assistant, "ssd_config": self.config}

    def __call__(self, **options):
        run = self.bench.run(Method({**self.options, **options}, None, 1), 0)
        if run.stats.draft_failure:
            raise RuntimeError(f"the draft failed: {run.stats.draft_failure}")
        return run.stats


def in_a_call(call: Call, measured: dict, report: Report) -> dict:
    call()  # warms up
    stats = measured["stats"] = call()
    report.draw_timeline(stats, f"lookahead {LOOKAHEAD}, budget {BUDGET}, {report.data['under way']}")
    seconds = stats.total_seconds - stats.prefill_seconds
    figures = figures_of([Run(stats.generated_tokens, stats.batch_size, 0.0, seconds, stats, None)])
    verify, wait, work = figures["verify ms"], figures["wait ms"], figures["prepare ms"] + figures["answer ms"]
    decoding = 1e3 * seconds / stats.rounds
    return {
        "a round": decoding,
        "target: verifies": verify,
        "target: waits for the draft": wait,
        "target: everything else": decoding - verify - wait,
        "draft: prepares": figures["prepare ms"],
        "draft: answers": figures["answer ms"],
        "draft: waits for the target": decoding - work,
        "hit rate": figures["hit rate"],
        "tokens a round": figures["tokens/round"],
        "wait on hits / verification": figures["wait on hits / verify"],
    }


def alone(pair: Pair, measured: dict) -> dict:
    """What either side takes while the other rests."""
    prompt = pair.batches(1)[0]["input_ids"]
    config = hf_ssd.SSDConfig(lookahead=LOOKAHEAD, budget=BUDGET)
    answer, prepare = draft_ms(pair.draft, prompt, config)
    _, eagerly = draft_ms(pair.draft, prompt, dataclasses.replace(config, cuda_graphs=False))
    step = forward_ms(pair.draft, prompt, 1)
    times = {
        "target: forward pass of 1 token": forward_ms(pair.target, prompt, 1),
        f"target: forward pass of {LOOKAHEAD + 1} tokens": forward_ms(pair.target, prompt, LOOKAHEAD + 1),
        "draft: forward pass of 1 token": step,
        f"draft: prepares {BUDGET} outcomes ({LOOKAHEAD + 1} forward passes)": prepare,
        "draft: the same without CUDA graphs": eagerly,
        "draft: answers on a hit": answer,
    }
    plain, verify = list(times.values())[:2]
    measured.update(plain=plain, verify=verify, prepare=prepare, answer=answer, drafting=LOOKAHEAD * step)
    return times


def projection(stats, times: dict) -> dict:
    """
    Theorem 7 for a target and a draft that do not take from each other: hits and accepted tokens as in the call, times
    as measured alone. After a miss the draft speculates just in time.
    """
    verify, plain = times["verify"] / 1e3, times["plain"] / 1e3
    late = max(0.0, times["prepare"] - times["verify"]) / 1e3
    hit, miss = late + times["answer"] / 1e3, times["drafting"] / 1e3
    waits = [hit if record.is_hit else miss for record in stats.records]
    apart = [
        dataclasses.replace(record, verify_seconds=verify, wait_seconds=wait)
        for record, wait in zip(stats.records, waits)
    ]
    speed = theory.predict(dataclasses.replace(stats, records=apart))
    return {
        "T_p, preparing over verifying": times["prepare"] / times["verify"],
        "T_b, drafting just in time over verifying": times["drafting"] / times["verify"],
        "tok/s": speed,
        "tok/s per device": speed / 2,
        "over plain": speed * plain,
        "over this call's measured speed": speed / theory.predict(stats),
    }


# ---------------------------------------------------------------- the profiler


def kinds_of() -> list[ProfilerActivity]:
    return sorted({ProfilerActivity.CPU, *torch.profiler.supported_activities()}, key=str)


def summary(profiled: profile, times: int) -> dict:
    """What the device computed and what the host did for it, each of so many times, in ms and in numbers."""
    events = list(profiled.key_averages())
    kernels = [e for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation]
    host = [e for e in events if e.device_type == DeviceType.CPU]

    def named(*names):
        return [e for e in host if e.key.startswith(names)]

    launches, waits = named(*LAUNCHES), named(*WAITS)
    operators = sum(e.self_cpu_time_total for e in host if e not in launches + waits)
    copies = [e for e in kernels if "DtoH" in e.key]
    return {
        "device: ms in kernels": 1e-3 * sum(e.self_device_time_total for e in kernels) / times,
        "device: kernels": sum(e.count for e in kernels) / times,
        "host: ms to launch": 1e-3 * sum(e.self_cpu_time_total for e in launches) / times,
        "host: launches": sum(e.count for e in launches) / times,
        "host: ms in operators": 1e-3 * operators / times,
        "host: ms waiting for the device": 1e-3 * sum(e.self_cpu_time_total for e in waits) / times,
        "host: waits for the device": sum(e.count for e in waits) / times,
        "copies from the device to the host": sum(e.count for e in copies) / times,
        "operators whose result the host needs": sum(e.count for e in named(*READS)) / times,
    }


def of_the_target(call: Call) -> dict:
    """Its prefill counts as one forward pass."""
    with profile(activities=kinds_of()) as profiled:
        stats = call(max_new_tokens=PROFILED_TOKENS)
    return summary(profiled, stats.rounds + 1)


@torch.inference_mode()
def of_the_draft(pair: Pair) -> dict:
    """In this process, without a target: where the draft shares the target's device, the profiler sees the target's."""
    config = hf_ssd.SSDConfig(lookahead=LOOKAHEAD, budget=BUDGET)
    answer, prepare = drafting(pair.draft, pair.batches(1)[0]["input_ids"], config)
    with profile(activities=kinds_of()) as profiled:
        for _ in range(PROFILED_ROUNDS):
            answer()
            prepare()
    return summary(profiled, PROFILED_ROUNDS)


def places_that_wait(call: Call) -> dict | str:
    """By file and line, how often torch says that the host waits for the device. Known for CUDA only."""
    if not torch.cuda.is_available():
        return "known for CUDA only"
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            call(max_new_tokens=PROFILED_TOKENS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return counted(said)


def counted(said: list[warnings.WarningMessage]) -> dict:
    """Returns how often each place waited, the most frequent ones first."""
    places = Counter(
        f"{'/'.join(Path(w.filename).parts[-2:])}:{w.lineno}" for w in said if SYNCHRONIZES in str(w.message)
    )
    return {"in all": places.total(), **dict(places.most_common(20))}
