"""Several parallel drafts, and compiled ones; distributions are in `tests/drafting/test_every_drafter.py`."""

import pytest
import torch

import hf_ssd

from ..helpers.tiny import padded_batch, tiny_draft, tiny_model

MASK = 96


@pytest.fixture(scope="module")
def pair():
    target = hf_ssd.enable(tiny_model())
    draft = tiny_draft(pard_token=MASK)
    with hf_ssd.launch_draft(draft, num_threads=1) as assistant:
        yield target, draft, assistant


def generate(target, model, rows, do_sample=False, seed=11, options=None, **settings):
    torch.manual_seed(seed)
    return target.generate(
        **padded_batch(rows),
        max_new_tokens=40,
        do_sample=do_sample,
        **(options or {}),
        assistant_model=model,
        ssd_config=hf_ssd.SSDConfig(**settings),
        return_dict_in_generate=True,
    )


@pytest.mark.slow
def test_several_drafts_and_compiled_ones_draft_in_parallel(pair):
    target, draft, _ = pair
    plain = target.generate(**padded_batch(2), max_new_tokens=40, do_sample=False)
    for options in ({"devices": ["cpu", "cpu"], "num_threads": 1}, {"compile": True, "num_threads": 1}):
        with hf_ssd.launch_draft(draft, **options) as assistant:
            output = generate(target, assistant, 2, lookahead=3, budget=6)
            in_turn = generate(target, draft, 2, True, lookahead=3, asynchronous=False)
            sampled = generate(target, assistant, 2, True, lookahead=3, budget=6)
        assert torch.equal(output.sequences, plain) and output.ssd_stats.hit_rate > 0.1
        assert torch.equal(sampled.sequences, in_turn.sequences) and sampled.ssd_stats.hit_rate > 0
