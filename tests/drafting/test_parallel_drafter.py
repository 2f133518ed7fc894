"""Which models draft in parallel. What they draft is compared in `test_matrix.py`, ahead and in turn."""

import pytest
import torch
from transformers import GenerationConfig

import hf_ssd
from hf_ssd import SSDConfig
from hf_ssd.drafting.drafters import drafter_for
from hf_ssd.drafting.parallel_drafter import ParallelDrafter

from ..helpers.tiny import padded_batch, tiny_model

VOCAB = 5


@pytest.mark.parametrize(
    "changes, settings, message",
    [
        ({}, {"drafter": "parallel"}, "no `pard_token`"),
        ({"pard_token": VOCAB}, {}, f"is {VOCAB}, which is not in its vocabulary of {VOCAB} tokens"),
        ({"pard_token": "<mask>"}, {}, "is '<mask>', which is not in its vocabulary"),
        ({}, {"drafter": "fast"}, '`drafter` is \'fast\', but must be "auto", "autoregressive", "parallel"'),
    ],
)
def test_what_cannot_draft_in_parallel_is_refused_in_a_sentence(changes, settings, message):
    target, draft = hf_ssd.enable(tiny_model(vocab_size=VOCAB)), tiny_model(vocab_size=VOCAB, **changes)
    inputs = {name: tensor % VOCAB for name, tensor in padded_batch(1).items()}
    with pytest.raises(ValueError, match=message):
        target.generate(**inputs, assistant_model=draft, ssd_config=SSDConfig(**settings))


def test_a_parallel_draft_can_be_told_to_draft_token_by_token():
    draft = tiny_model(vocab_size=VOCAB, pard_token=VOCAB)
    drafter = drafter_for(draft, SSDConfig(drafter="autoregressive"), GenerationConfig(), [torch.tensor([1])], seed=0)
    assert not isinstance(drafter, ParallelDrafter)
