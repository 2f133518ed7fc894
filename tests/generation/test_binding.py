"""A model that was enabled with its draft speculates in every call, and arguments of a call win."""

import copy
import functools

import pytest
import torch
from transformers import GenerationConfig, pipeline
from transformers.models.auto.tokenization_auto import AutoTokenizer

import hf_ssd

from ..helpers.servers import PAIR
from ..helpers.tiny import padded_batch, tiny_draft, tiny_model
from ..helpers.vocabularies import DRAFT, TARGET, renamed_draft, tokenizer

CONFIG = hf_ssd.SSDConfig(lookahead=3, budget=8, asynchronous=False)
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}


@pytest.fixture
def bound(draft):
    return hf_ssd.enable(tiny_model(), assistant_model=draft, ssd_config=CONFIG)


def lookahead(output) -> int:
    """Returns the largest lookahead of a call, 0 without a draft."""
    stats = getattr(output, "ssd_stats", None)
    return max(stats.column("lookahead")) if stats else 0


def test_every_call_speculates(bound):
    inputs = padded_batch(2)
    expected = tiny_model().generate(**inputs, **OPTIONS).sequences
    for options in (OPTIONS, {"generation_config": GenerationConfig(**OPTIONS)}):
        output = bound.generate(**inputs, **options)
        assert torch.equal(output.sequences, expected) and lookahead(output) == 3


def test_arguments_of_a_call_win(bound):
    inputs, other, shorter = padded_batch(2), tiny_draft(seed=5), {**CONFIG.to_dict(), "lookahead": 2}
    assert lookahead(bound.generate(**inputs, **OPTIONS, ssd_config=None)) == 0
    assert lookahead(bound.generate(**inputs, **OPTIONS, ssd_config=shorter)) == 2
    theirs = bound.generate(**inputs, **OPTIONS, assistant_model=other).ssd_stats
    assert theirs.column("accepted") != bound.generate(**inputs, **OPTIONS).ssd_stats.column("accepted")
    way = functools.partial(lambda model, input_ids, *rest, **more: input_ids)
    assert torch.equal(bound.generate(**inputs, max_new_tokens=5, custom_generate=way), inputs["input_ids"])


def test_enabling_again_replaces_or_forgets_the_draft(bound, draft):
    inputs = padded_batch(1)
    hf_ssd.enable(bound, draft, {**CONFIG.to_dict(), "lookahead": 1})
    assert lookahead(bound.generate(**inputs, **OPTIONS)) == 1
    assert lookahead(copy.deepcopy(bound).generate(**inputs, **OPTIONS)) == 0  # a copy has no draft
    hf_ssd.enable(bound)
    assert lookahead(bound.generate(**inputs, **OPTIONS)) == 0
    assert lookahead(bound.generate(**inputs, **OPTIONS, assistant_model=draft, ssd_config=CONFIG)) == 3


def test_what_cannot_work_is_said_when_it_is_enabled(draft):
    with pytest.raises(ValueError, match="`ssd_config` needs an `assistant_model`"):
        hf_ssd.enable(tiny_model(), ssd_config=CONFIG)
    with pytest.raises(TypeError, match="must be a transformers model, a folder or hub id"):
        hf_ssd.enable(tiny_model(), assistant_model=3)
    with pytest.raises(TypeError, match="must be an hf_ssd.SSDConfig or a dict"):
        hf_ssd.enable(tiny_model(), draft, ssd_config=3)


def test_a_pipeline_speculates():
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    generator = pipeline("text-generation", model=str(PAIR / "target"), tokenizer=tokenizer, dtype=torch.float32)
    options = {"max_new_tokens": 20, "do_sample": False, "return_full_text": False}
    expected, rounds = generator("import os\n", **options), []
    hf_ssd.enable(generator.model, assistant_model=str(PAIR / "draft"), ssd_config=hf_ssd.SSDConfig(lookahead=3))
    streamer = hf_ssd.RoundStreamer(lambda stats: rounds.append(stats.rounds))
    assert generator("import os\n", **options, streamer=streamer) == expected
    assert rounds == list(range(len(rounds))) and 0 < len(rounds) <= 20


def test_a_draft_with_another_tokenizer_is_bound_with_both():
    model, tokens = tiny_model(vocab_size=len(TARGET)), {"tokenizer": tokenizer(TARGET)}
    draft, inputs = renamed_draft(), padded_batch(4)
    expected = model.generate(**inputs, **OPTIONS).sequences
    with pytest.raises(ValueError, match="Tokenizers are for a draft"):
        hf_ssd.enable(model, **tokens)
    with pytest.raises(ValueError, match="pass `tokenizer="):
        hf_ssd.enable(model, draft, CONFIG, assistant_tokenizer=tokenizer(DRAFT))
    hf_ssd.enable(model, draft, CONFIG, **tokens, assistant_tokenizer=tokenizer(DRAFT))
    for _ in range(2):
        output = model.generate(**inputs, **OPTIONS)
        assert torch.equal(output.sequences, expected)
        assert lookahead(output) == 3 and output.ssd_stats.acceptance_rate > 0
    assert lookahead(model.generate(**inputs, **OPTIONS, ssd_config=None)) == 0
