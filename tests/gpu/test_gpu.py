"""
Target and draft on GPUs. Skipped where there are none, unless HF_SSD_TEST_DEVICES names devices that take their place,
as in `HF_SSD_TEST_DEVICES=cpu,cpu pytest tests/gpu -m gpu`.
"""

import os
import signal

import pytest
import torch
from transformers import LogitsProcessorList, set_seed

import hf_ssd

from ..helpers import comparing
from ..helpers.at_length import AtLength
from ..helpers.programs import run
from ..helpers.tiny import padded_batch, ready, tiny_draft, tiny_model

NAMED = os.environ.get("HF_SSD_TEST_DEVICES")
KIND = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else None
GPUS = [f"{KIND}:{index}" for index in range(torch.accelerator.device_count())] if KIND else []
DEVICES = NAMED.split(",") if NAMED else GPUS
ON_GPUS = DEVICES == GPUS and bool(GPUS)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not DEVICES, reason="needs a GPU")]
two_devices = pytest.mark.skipif(len(DEVICES) < 2, reason="needs two GPUs")
two_gpus = pytest.mark.skipif(not ON_GPUS or len(DEVICES) < 2, reason="needs two GPUs, and nothing in their place")

TARGET, OTHER = (DEVICES or ["cpu"])[0], (DEVICES or ["cpu"])[-1]
PLACES = [pytest.param(TARGET, id="one GPU"), pytest.param(OTHER, id="two GPUs", marks=two_devices)]
PLACES += [pytest.param("cpu", id="CPU", marks=pytest.mark.skipif(not ON_GPUS, reason="is what is tested already"))]
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 30}
GREEDY = {"do_sample": False}
CONTEXT = 8192 if ON_GPUS else 512  # tokens
LENGTH, NEW_TOKENS = 9, 40
SIZES = {"max_position_embeddings": 16384}
# Of the largest logit's size: bfloat16 has 8 bits, and what it rounds away adds up from layer to layer.
ROUNDING = 2**-5


@pytest.fixture(scope="module")
def target():
    return hf_ssd.enable(tiny_model(**SIZES).to(TARGET))


@pytest.fixture(scope="module")
def draft():
    return tiny_draft(**SIZES).to(TARGET)


@pytest.fixture(scope="module")
def shared():
    """A worker on the target's device."""
    with hf_ssd.launch_draft(tiny_draft(**SIZES).to(TARGET)) as assistant:
        yield assistant


def inputs(rows):
    return {key: value.to(TARGET) for key, value in padded_batch(rows, LENGTH).items()}


def generate(target, assistant, rows=3, prompts=None, processor=None, **options):
    set_seed(3)
    options |= {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    processors = LogitsProcessorList([processor] if processor else [])
    speculates = comparing.settings(assistant, lookahead=3, budget=8)
    return target.generate(**(prompts or inputs(rows)), **options, logits_processor=processors, **speculates)


def plain(target, rows=3, prompts=None, **options):
    return target.generate(**(prompts or inputs(rows)), max_new_tokens=NEW_TOKENS, do_sample=False, **options)


def speculates(output):
    return output.ssd_stats.draft_failure is None and output.ssd_stats.hit_rate > 0


@pytest.mark.parametrize("place", PLACES)
def test_greedy_and_sampled_with_the_draft_in_each_place(target, place):
    draft = tiny_draft(**SIZES).to(place)
    with hf_ssd.launch_draft(draft) as assistant:
        assert assistant.device == place
        greedy = generate(target, assistant, **GREEDY)
        sampled = generate(target, assistant, **SAMPLED)
        again = generate(target, assistant, **SAMPLED)
    assert torch.equal(greedy.sequences, plain(target)) and speculates(greedy)
    assert torch.equal(sampled.sequences, again.sequences)
    assert torch.equal(sampled.sequences, generate(target, draft, **SAMPLED).sequences)


@pytest.mark.parametrize("rows", [1, 8])
def test_sampled_runs_are_those_of_the_oracle(target, draft, shared, rows):
    oracle = generate(target, draft, rows, **SAMPLED)
    output = generate(target, shared, rows, **SAMPLED)
    assert torch.equal(output.sequences, oracle.sequences) and speculates(output)
    assert not torch.equal(output.sequences, plain(target, rows))  # the mutant: it was not sampled


def test_a_long_context_is_that_of_the_oracle(target, draft, shared):
    ids = torch.randint(2, 97, (1, CONTEXT), generator=torch.Generator().manual_seed(0)).to(TARGET)
    prompts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    greedy, sampled = (generate(target, shared, prompts=prompts, **how) for how in (GREEDY, SAMPLED))
    assert torch.equal(greedy.sequences, plain(target, prompts=prompts)) and speculates(greedy)
    assert torch.equal(sampled.sequences, generate(target, draft, prompts=prompts, **SAMPLED).sequences)


# ---------------------------------------------------------------- bfloat16


def check_up_to_rounding(ours: torch.LongTensor, theirs: torch.LongTensor, logits: torch.Tensor) -> None:
    """
    Greedy tokens must be the same, or plain decoding, whose logits these are, must have been undecided between the two
    where a row first differs: passes over more tokens round in other ways, and what follows is another text.
    """
    assert ours.shape == theirs.shape
    for row, (a, b) in enumerate(zip(ours.tolist(), theirs.tolist())):
        first = next((i for i in range(len(a)) if a[i] != b[i]), None)
        if first is None:
            continue
        scores = logits[row, first].float()
        best, chosen = scores.max().item(), scores[a[first]].item()
        assert best - chosen <= ROUNDING * abs(best), f"row {row}: token {first} is {chosen}, {best} was possible"


@pytest.fixture(scope="module")
def halves():
    target, draft = (make(**SIZES).to(TARGET, torch.bfloat16) for make in (tiny_model, tiny_draft))
    with hf_ssd.launch_draft(draft) as assistant:
        yield hf_ssd.enable(target), assistant


@pytest.mark.parametrize("rows", [1, 8])
def test_bfloat16(halves, rows):
    target, assistant = halves
    expected = plain(target, rows, output_logits=True, return_dict_in_generate=True)
    output = generate(target, assistant, rows, **GREEDY)
    ours, theirs = output.sequences[:, LENGTH:], expected.sequences[:, LENGTH:]
    logits = torch.stack(expected.logits, dim=1)
    check_up_to_rounding(ours, theirs, logits)
    assert speculates(output)
    sampled = generate(target, assistant, rows, **SAMPLED)
    assert speculates(sampled) and sampled.sequences.shape == (rows, LENGTH + NEW_TOKENS)
    # The mutant: the second best token, at the place where plain decoding was most decided.
    best = logits[0].float().topk(2)
    place = int((best.values[:, 0] - best.values[:, 1]).argmax())
    wrong = theirs.clone()
    wrong[0, place] = best.indices[place, 1]
    with pytest.raises(AssertionError, match="was possible"):
        check_up_to_rounding(wrong, theirs, logits)


# ---------------------------------------------------------------- two devices, failures


@two_devices
def test_several_workers(target):
    with hf_ssd.launch_draft(tiny_draft(**SIZES).to(OTHER), devices=[TARGET, OTHER]) as assistant:
        output = generate(target, assistant, **GREEDY)
    assert torch.equal(output.sequences, plain(target)) and speculates(output)


@pytest.fixture
def far(draft):
    """A worker on the other device, where there are two devices."""
    with hf_ssd.launch_draft(draft, device=OTHER) as assistant:
        yield assistant


def test_a_worker_killed_in_the_middle_of_a_call_takes_nothing_with_it(target, draft, far):
    """Not even a computation on the target's own device may hang."""
    pid = far.workers[0].worker_info["pid"]
    kill = AtLength(LENGTH + 9, lambda: os.kill(pid, signal.SIGKILL))
    output = generate(target, far, processor=kill, **SAMPLED)
    assert output.ssd_stats.draft_failure and output.sequences.shape == (3, LENGTH + NEW_TOKENS)
    ready(far)
    kill = AtLength(LENGTH + 9, lambda: os.kill(far.workers[0].worker_info["pid"], signal.SIGKILL))
    output = generate(target, far, processor=kill, **GREEDY)
    assert output.ssd_stats.draft_failure and torch.equal(output.sequences, plain(target))
    again = generate(target, ready(far), **SAMPLED)  # another worker
    assert torch.equal(again.sequences, generate(target, draft, **SAMPLED).sequences) and speculates(again)


@two_gpus
def test_torchrun():
    said = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "examples/generate_tp.py")
    assert "1 target ranks, 1 draft ranks" in said and "hit rate" in said
