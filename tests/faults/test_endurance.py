"""Many calls, several programs, several targets: nothing grows, and nobody gets in anybody's way."""

import gc
import os
import subprocess
import sys
import textwrap
import threading

import psutil
import pytest
import torch

import hf_ssd

from ..helpers.tiny import padded_batch, tiny_draft, tiny_model

CONFIG = {"lookahead": 2, "budget": 4}


def footprint(process):
    """Open files, threads and megabytes."""
    return process.num_fds(), process.num_threads(), process.memory_info().rss / 2**20


@pytest.mark.slow
def test_two_hundred_calls_leave_nothing_behind(target):
    inputs = padded_batch(2)
    with hf_ssd.launch_draft(tiny_draft(), num_threads=1) as assistant:
        pid = assistant.workers[0].process.popen.pid
        processes = [psutil.Process(), psutil.Process(pid)]

        def call(times):
            for _ in range(times):
                target.generate(
                    **inputs,
                    do_sample=True,
                    max_new_tokens=6,
                    assistant_model=assistant,
                    ssd_config=hf_ssd.SSDConfig(**CONFIG),
                )

        gc.collect()
        gc.disable()  # what a call took is free when it returns
        try:
            call(60)
            before = [footprint(process) for process in processes]
            call(200)
            after = [footprint(process) for process in processes]
        finally:
            gc.enable()
    for (files, threads, memory), (files_after, threads_after, memory_after) in zip(before, after):
        assert files_after <= files and threads_after <= threads
        assert memory_after - memory < 32  # to keep the draft's cache of each call would take 80 and more
    assert assistant.workers[0].process.popen.poll() is not None


PROGRAM = textwrap.dedent(
    """
    import hf_ssd, torch, sys
    from transformers import AutoModelForCausalLM
    torch.set_num_threads(1)
    target = hf_ssd.enable(AutoModelForCausalLM.from_pretrained({folder!r}))
    draft = hf_ssd.launch_draft(AutoModelForCausalLM.from_pretrained({folder!r}))
    inputs = dict(input_ids=torch.tensor([[5, 6, 7]]), attention_mask=torch.ones(1, 3), do_sample=False)
    plain = target.generate(**inputs, max_new_tokens=40)
    for _ in range(5):
        output = target.generate(**inputs, max_new_tokens=40, assistant_model=draft,
                                 ssd_config=hf_ssd.SSDConfig(on_draft_failure="raise"), return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain) and output.ssd_stats.draft_joined_at == 0
    """
)


def test_several_programs_at_the_same_time(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    program = PROGRAM.format(folder=str(tmp_path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, env=environment) for _ in range(3)
    ]
    for process in running:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors.decode()


def test_two_targets_in_one_program_at_the_same_time():
    targets = [hf_ssd.enable(tiny_model(seed=seed)) for seed in (0, 1)]
    drafts = [hf_ssd.launch_draft(tiny_draft(seed=seed)) for seed in (0, 1)]
    inputs, results = padded_batch(2), [None, None]

    def call(i):
        config = hf_ssd.SSDConfig(**CONFIG, on_draft_failure="raise")
        results[i] = [
            targets[i].generate(
                **inputs, max_new_tokens=30, do_sample=False, assistant_model=drafts[i], ssd_config=config
            )
            for _ in range(3)
        ]

    threads = [threading.Thread(target=call, args=[i]) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for draft in drafts:
        draft.close()
    for target, outputs in zip(targets, results):
        plain = target.generate(**inputs, max_new_tokens=30, do_sample=False)
        assert outputs is not None and all(torch.equal(output, plain) for output in outputs)
