"""Many calls, several programs, several targets: nothing grows, and nobody gets in anybody's way."""

import functools
import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

import hf_ssd

from ..helpers.calls import call
from ..helpers.channels import both
from ..helpers.processes import workers_are
from ..helpers.programs import run
from ..helpers.tiny import tiny_draft, tiny_model

CONFIG = {"lookahead": 2, "budget": 4}


def footprint(process):
    """Open files, threads and megabytes."""
    return process.num_fds(), process.num_threads(), process.memory_info().rss / 2**20


@pytest.mark.slow
def test_two_hundred_calls_leave_nothing_behind(monkeypatch):
    """In both processes the collector is off: what a call took is free when it returns."""
    sizes = {"num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 600}
    target, draft = hf_ssd.enable(tiny_model(**sizes)), tiny_draft(**sizes)
    program = "import gc; gc.disable(); from hf_ssd.distributed.worker import main; main()"
    workers_are(monkeypatch, [sys.executable, "-c", program])
    prompts = torch.randint(2, 97, (260, 2, 100), generator=torch.Generator().manual_seed(0))
    with hf_ssd.launch_draft(draft, num_threads=1) as assistant:
        worker = assistant.workers[0].process.popen
        processes = [psutil.Process(), psutil.Process(worker.pid)]

        def footprints_after(prompts):
            for batch in prompts:
                options = {"max_new_tokens": 6, "do_sample": True, "assistant_model": assistant}
                target.generate(batch, **options, ssd_config=hf_ssd.SSDConfig(**CONFIG))
            return [footprint(process) for process in processes]

        gc.collect()
        gc.disable()
        try:
            before, after = footprints_after(prompts[:60]), footprints_after(prompts[60:])
        finally:
            gc.enable()
    for (files, threads, memory), (files_after, threads_after, memory_after) in zip(before, after):
        assert files_after <= files and threads_after <= threads
        assert memory_after - memory < 32  # to keep a cache of each call would take 490
    assert worker.poll() is not None


PROGRAM = """
import hf_ssd
from tests.helpers.calls import call
from tests.helpers.tiny import tiny_model
target, draft = hf_ssd.enable(tiny_model()), hf_ssd.launch_draft(tiny_model())
for _ in range(5):
    assert call(target, draft, settings={"on_draft_failure": "raise"}).ssd_stats.draft_joined_at == 0
"""


@pytest.mark.slow
def test_several_programs_at_the_same_time():
    with ThreadPoolExecutor() as threads:
        programs = [threads.submit(run, "-c", PROGRAM, timeout=200) for _ in range(3)]
    assert [program.result() for program in programs] == [""] * 3


@pytest.mark.slow
def test_two_targets_in_one_program_at_the_same_time():
    def calls(target, draft):
        with hf_ssd.launch_draft(draft) as assistant:
            stats = [call(target, assistant, settings={"on_draft_failure": "raise"}).ssd_stats for _ in range(3)]
        return min(one.acceptance_rate for one in stats)

    pairs = [(hf_ssd.enable(tiny_model(seed=seed)), tiny_draft(seed=seed)) for seed in (0, 1)]
    assert all(rate > 0 for rate in both(*(functools.partial(calls, *pair) for pair in pairs)))
