"""Every family of decoder-only models in transformers: its tokens are those of plain generate(), or it is refused."""

import re

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_ssd
from hf_ssd.cache.support import attention_layout

from ..conftest import padded_batch
from .families import WINDOW, likely_draft, sharp_model, tiny_config

NOT_TRIED = {
    "blt": "its four models in one have no common sizes",
    "cohere_compass_text": "its layer types are no default",
    "dbrx": "its config lacks what its own attention reads",
    "dots1": "its default config has no experts",
    "dots3_note": "its text model is dots3_note_text, which is tried",
    "gemma3n": "its vision tower needs timm",
    "gemma4_assistant": "it reads hidden states of another model",
    "gemma4_unified_assistant": "it reads hidden states of another model",
    "git": "plain generate() with padding and without an image reads the padding, which ours does not",
    "musicgen": "it generates audio, and its decoder has a config of its own",
    "musicgen_melody": "it generates audio, and its decoder has a config of its own",
    "reformer": "its positions need factors of its width",
    "zamba": "its layer types are lists as long as the layers, and recurrent",
}


REFUSED = re.compile(
    "takes no `position_ids`|cannot be rolled back|does not take a 4D attention mask|does not obey a 4D attention mask|"
    "other logits for several tokens behind its recurrent state"
)


@pytest.mark.slow
@pytest.mark.parametrize("family", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_a_family_gives_the_tokens_of_plain_generate_or_is_refused(family):
    if family in NOT_TRIED:
        pytest.skip(NOT_TRIED[family])
    config = tiny_config(family)
    target = hf_ssd.enable(sharp_model(config))
    inputs = padded_batch(2)
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    ssd_config = hf_ssd.SSDConfig(lookahead=3, asynchronous=False)
    try:
        is_hybrid = attention_layout(target).recurrent
        draft = likely_draft(target) if is_hybrid else sharp_model(config, noise=0.02)
        output = target.generate(**inputs, **options, assistant_model=draft, ssd_config=ssd_config)
    except ValueError as error:
        assert f"{type(target).__name__} " in str(error) and REFUSED.search(str(error))
        return
    plain = target.generate(**inputs, **options)
    assert output.ssd_stats.draft_failure is None and plain.sequences.shape[1] > 2 * WINDOW
    for ours, theirs in zip(output.logits, plain.logits, strict=True):
        assert (ours - theirs).abs().max() <= 1e-3 * theirs.abs().max()
    assert torch.equal(output.sequences, plain.sequences)
