"""Whole calls of `generate()` on the stand-in GPU, with the phases of a round told apart on both sides."""

import contextlib
import dataclasses
import functools
import gc

import torch
from transformers import set_seed

import hf_ssd
from hf_ssd.cache.branches import Branches
from hf_ssd.distributed.draft_server import DraftServer
from hf_ssd.drafting.speculator import Speculator
from hf_ssd.generation import loop
from hf_ssd.generation.deciding import CallRows
from hf_ssd.generation.draft import FaultTolerantDraft
from hf_ssd.generation.sequences import Sequences

from .loopback import assistant_of
from .stand_in_gpu import StandInGPU, to_gpu
from .tiny import padded_batch, tiny_draft, tiny_model

LOOKAHEAD = 3
SAMPLED = {"do_sample": True, "temperature": 0.3, "top_k": 5}


def generate(
    monkeypatch, rows: int, do_sample: bool, family: str = "llama", gpu=None, calls: int = 1, watch=None, **options
):
    """
    Generates with target and draft on the stand-in, the draft in a worker without a process of its own. Of several
    calls the last one counts, for which the context manager `watch` is entered. The options are settings of `SSDConfig`
    and options of `generate()`. Returns the output, and the stand-in with what waited in each phase.
    """
    gpu = StandInGPU() if gpu is None else gpu
    _mark_phases(monkeypatch, gpu)
    names = [name for name in options if name in {field.name for field in dataclasses.fields(hf_ssd.SSDConfig)}]
    settings = {"lookahead": LOOKAHEAD, "budget": 8, "cuda_graphs": False}  # it has none, except where there are tapes
    config = hf_ssd.SSDConfig(**{**settings, **{name: options.pop(name) for name in names}})
    if config.asynchronous:
        aside = functools.partial(_aside, gpu)
        monkeypatch.setattr(loop, "assistant_for", lambda draft, info: assistant_of(draft, aside))
    model, draft = hf_ssd.enable(to_gpu(tiny_model(family))), to_gpu(tiny_draft(family))
    inputs = padded_batch(rows) if rows > 1 else {"input_ids": padded_batch(1)["input_ids"]}
    for call in range(calls):
        set_seed(3)
        gpu.visits.clear()
        gc.collect()  # the two sides of a loopback keep each other, and the draft's cache
        gpu.begin("")
        with torch.inference_mode(), gpu, watch if watch and call == calls - 1 else contextlib.nullcontext():
            output = model.generate(
                **{name: value.to("cuda") for name, value in inputs.items()},
                **(SAMPLED if do_sample else {"do_sample": False}),
                **{"max_new_tokens": 40, **options},
                assistant_model=draft,
                ssd_config=config,
                return_dict_in_generate=True,
            )
    return output, gpu


@contextlib.contextmanager
def _aside(gpu: StandInGPU):
    """What happens here belongs to phases of its own, and what comes after it to the phase before."""
    before = gpu.now
    yield
    gpu.now = before


def _mark_phases(monkeypatch, gpu: StandInGPU) -> None:
    """Lets a phase begin, or the next one, where a function is called, or has returned."""

    def mark(owner, name, before=None, after=None):
        original = getattr(owner, name)

        def marked(*arguments, **options):
            phase = before(*arguments) if callable(before) else before
            if phase:
                gpu.begin(phase)
            result = original(*arguments, **options)
            if after:
                gpu.begin(after)
            return result

        monkeypatch.setattr(owner, name, marked)

    mark(CallRows, "decide", "target: decide")
    mark(FaultTolerantDraft, "send_outcome", "target: send outcome", "target: bookkeeping")
    mark(FaultTolerantDraft, "receive_speculation", "target: receive")
    mark(Sequences, "propose", "target: feed")
    mark(FaultTolerantDraft, "receive_probabilities", "target: receive q")
    mark(FaultTolerantDraft, "finish", "target: end")
    mark(DraftServer, "_start", "draft: start")
    mark(Speculator, "look_up", "draft: look up")
    mark(Speculator, "complete", _completion, "draft: answer")
    mark(Speculator, "_choose", "draft: choose outcomes")
    mark(Branches, "grow", "draft: grow")
    mark(Speculator, "_learn", "draft: learn")
    mark(DraftServer, "_end", "draft: end")


def _completion(speculator: Speculator, found, *_) -> str:
    known = [len(tokens) for tokens, finished in zip(found.tokens, speculator.finished) if not finished]
    done = min(known, default=0) >= speculator.plan.lookahead
    return "draft: complete on a hit" if done else "draft: complete on a miss"
