"""Target and draft on GPUs. Skipped where there are none."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import set_seed

import hf_ssd

from ..conftest import padded_batch, tiny_draft, tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

PLACES = ["cuda:0", pytest.param("cuda:1", marks=two_gpus), "cpu"]
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 30}


@pytest.fixture(scope="module")
def target():
    return hf_ssd.enable(tiny_model().to("cuda:0"))


def generate(target, assistant, **options):
    set_seed(3)
    config = hf_ssd.SSDConfig(lookahead=3, budget=8, asynchronous=not isinstance(assistant, torch.nn.Module))
    inputs = {key: value.to("cuda:0") for key, value in padded_batch(3).items()}
    return target.generate(
        **inputs,
        **options,
        max_new_tokens=40,
        assistant_model=assistant,
        ssd_config=config,
        return_dict_in_generate=True,
    )


@pytest.mark.parametrize("place", PLACES)
def test_greedy_and_sampled_with_the_draft_in_each_place(target, place):
    inputs = {key: value.to("cuda:0") for key, value in padded_batch(3).items()}
    plain = target.generate(**inputs, max_new_tokens=40, do_sample=False)
    draft = tiny_draft().to(place)
    with hf_ssd.launch_draft(draft) as assistant:
        assert assistant.device == place
        greedy = generate(target, assistant, do_sample=False)
        sampled = generate(target, assistant, **SAMPLED)
        again = generate(target, assistant, **SAMPLED)
    assert torch.equal(greedy.sequences, plain) and greedy.ssd_stats.hit_rate > 0
    assert torch.equal(sampled.sequences, again.sequences)
    assert torch.equal(sampled.sequences, generate(target, draft, **SAMPLED).sequences)


@two_gpus
def test_several_workers(target):
    with hf_ssd.launch_draft(tiny_draft().to("cuda:1"), devices=["cuda:0", "cuda:1"]) as assistant:
        output = generate(target, assistant, do_sample=False)
    inputs = {key: value.to("cuda:0") for key, value in padded_batch(3).items()}
    assert torch.equal(output.sequences, target.generate(**inputs, max_new_tokens=40, do_sample=False))


@two_gpus
def test_probabilities_go_from_gpu_to_gpu(target):
    draft = tiny_draft().to("cuda:1")
    with hf_ssd.launch_draft(draft) as assistant:
        outputs = [generate(target, assistant, **SAMPLED) for _ in range(3)]
        assert assistant.workers[0].channel.link.device == torch.device("cuda:0")
    oracle = generate(target, draft, **SAMPLED).sequences
    assert all(torch.equal(output.sequences, oracle) for output in outputs)


@two_gpus
def test_torchrun():
    command = [Path(sys.executable).parent / "torchrun", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*map(str, command), str(EXAMPLES / "generate_tp.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 target ranks, 1 draft ranks" in done.stdout and "hit rate" in done.stdout
