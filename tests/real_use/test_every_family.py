"""Every family of decoder-only models of transformers: its tokens are those of plain generate(), or it is refused."""

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_ssd

from ..conftest import padded_batch
from .families import WINDOW, sharp_model, tiny_config

NOT_SMALL = "its config takes no sizes by their names alone"
NAMED = (
    "blt cohere_compass_text dbrx dots1 dots3_note gemma3n gemma4_assistant gemma4_unified_assistant lfm2_moe musicgen "
)
NAMED += "musicgen_melody nemotron reformer zamba zamba2"
NOT_TRIED = dict.fromkeys(NAMED.split(), NOT_SMALL)
OTHER_TOKENS = {"git": "a row that is padded on the left gets other tokens than from plain generate()"}


@pytest.mark.slow
@pytest.mark.parametrize("family", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_a_family_gives_the_tokens_of_plain_generate_or_is_refused(family, request):
    if family in NOT_TRIED:
        pytest.skip(NOT_TRIED[family])
    if family in OTHER_TOKENS:
        request.applymarker(pytest.mark.xfail(strict=True, reason=OTHER_TOKENS[family]))
    config = tiny_config(family)
    target, draft = hf_ssd.enable(sharp_model(config)), sharp_model(config, noise=0.02)
    inputs = padded_batch(2)
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    ssd_config = hf_ssd.SSDConfig(lookahead=3, asynchronous=False)
    try:
        output = target.generate(**inputs, **options, assistant_model=draft, ssd_config=ssd_config)
    except ValueError as error:
        assert f"{type(target).__name__} " in str(error) and str(error).endswith(".")
        return
    plain = target.generate(**inputs, **options)
    assert output.ssd_stats.draft_failure is None and plain.sequences.shape[1] > 2 * WINDOW
    for ours, theirs in zip(output.logits, plain.logits, strict=True):
        assert (ours - theirs).abs().max() <= 1e-3 * theirs.abs().max()
    assert torch.equal(output.sequences, plain.sequences)
