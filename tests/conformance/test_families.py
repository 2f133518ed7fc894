"""Every family of decoder-only models in transformers: its tokens are those of plain generate(), or it is refused."""

import dataclasses

import pytest
import torch
import transformers
from transformers import AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_ssd
from hf_ssd.cache import masks
from hf_ssd.cache.cache_name import CACHE
from hf_ssd.cache.cached_model import CachedModel
from hf_ssd.cache.ragged import RaggedCache
from hf_ssd.cache.support import is_recurrent
from hf_ssd.rounds import AHEAD

from ..helpers import comparing
from ..helpers.comparing import settings
from ..helpers.families import WINDOW, sharp_model, sharp_pair, tiny_config
from ..helpers.preparing import ahead, preparing
from ..helpers.suites import slowly
from ..helpers.tiny import padded_batch, tiny_llava, tiny_model
from .models import FAMILIES, LISTED_WITH, MULTIMODAL, NOT_BUILT, PAGE, POPULAR, QUICK, REFUSED, SUPPORTED, page

GREEDY = {**comparing.GREEDY, "max_new_tokens": 24, "eos_token_id": None, "output_logits": True}
REGISTERED = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in FAMILIES]


def differ(logits, others):
    return (logits - others).abs().max() / others.abs().max()


class Knows:
    """Proposes what plain generation goes on with, but every fourth token is another one."""

    def __init__(self, plain, attention_mask):
        padding = (attention_mask == 0).sum(1).tolist()
        self.texts = [row[skipped:].tolist() for row, skipped in zip(plain, padding)]

    def propose(self, input_ids, lookahead):
        known = input_ids[0].tolist()
        text = next((text for text in self.texts if text[: len(known)] == known), known)
        stop = len(known) + lookahead
        tokens = [
            token if place % 4 else (token + 1) % 97 for place, token in enumerate(text[len(known) : stop], len(known))
        ]
        return torch.tensor(tokens, dtype=torch.long), None


class EveryThird:
    """Forbids the favourite at every third length, where a draft without this processor is rejected."""

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] % 3 == 0:
            scores = scores.scatter(1, scores.argmax(-1, keepdim=True), -torch.inf)
        return scores


def check_same(output, plain):
    assert plain.sequences.shape[1] > 2 * WINDOW and differ(*plain.logits[10:12]) > 0.01
    assert torch.equal(output.sequences, plain.sequences) and output.ssd_stats.draft_failure is None
    assert all(differ(ours, theirs) < 1e-3 for ours, theirs in zip(output.logits, plain.logits, strict=True))


def check_cache(ours, theirs):
    assert ours.get_seq_length() == theirs.get_seq_length()
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        for name in ("conv_states", "recurrent_states"):
            for index, state in getattr(other, name, {}).items():
                if state is not None:
                    assert (getattr(one, name)[index] - state).abs().max() <= 1e-4 * state.abs().max()


def check_target(target, draft, cases):
    """Some drafted tokens are accepted and some are rejected: the draft is `None` where only another model's fits."""
    for rows, lookaheads in cases.items():
        inputs = padded_batch(rows)
        plain = target.generate(**inputs, **GREEDY)
        model, options, planned = draft, {}, ahead
        if draft is None:  # its tokens hit seldom, so the fallback is asked
            model, planned = tiny_model(), lambda plan, _: dataclasses.replace(plan, mode=AHEAD, budget=1)
            options = {"fallback": Knows(plain.sequences, inputs["attention_mask"])}
        for lookahead in lookaheads:
            with preparing(planned):
                output = target.generate(**inputs, **GREEDY, **settings(model, lookahead=lookahead, **options))
            check_same(output, plain)
            check_cache(output[CACHE], plain[CACHE])
            assert 1.05 < output.ssd_stats.tokens_per_round < lookahead + 1


def check_draft(target, draft):
    """A draft with the target's weights: each of its tokens is accepted, ahead of time and after rejections too."""
    inputs, options = padded_batch(3), {**GREEDY, "logits_processor": [EveryThird()]}
    plain = target.generate(**inputs, **options)
    with preparing() as hits:
        output = target.generate(**inputs, **options, **settings(draft))
    check_same(output, plain)
    assert all(accepted == [2, 2, 2] for accepted in output.ssd_stats.column("accepted")[:-1])
    assert sum(hits) / len(hits) > 0.5


def check_family(name, cases):
    as_target, as_draft = FAMILIES[name]
    if name in NOT_BUILT:
        pytest.skip(NOT_BUILT[name])
    config = tiny_config(name)
    target, copy = hf_ssd.enable(sharp_model(config)), sharp_model(config)
    if as_target == SUPPORTED:
        agrees = as_draft == SUPPORTED and not is_recurrent(config)  # noise changes recurrent states too much
        check_target(target, sharp_model(config, noise=0.02) if agrees else None, cases)
        if as_draft == SUPPORTED:
            check_draft(target, copy)
    else:
        assert refusal(target, tiny_model()).startswith(f"{type(target).__name__} {REFUSED[as_target]}")
    if as_draft != SUPPORTED:
        assert refusal(hf_ssd.enable(tiny_model()), copy).startswith(f"{type(copy).__name__} {REFUSED[as_draft]}")


def refusal(target, draft):
    with pytest.raises(ValueError) as error:
        target.generate(**padded_batch(1), **GREEDY, **settings(draft))
    return str(error.value)


@pytest.mark.parametrize("name, cases", [
    *((name, {}) for name in QUICK if name in REGISTERED),
    *(slowly(name, {1: [4], 3: [1, 7]}) for name in REGISTERED),
])  # fmt: skip
def test_a_family_gives_the_tokens_of_plain_generate_or_is_refused(name, cases):
    check_family(name, cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in POPULAR if name in REGISTERED])
def test_a_worker_samples_the_tokens_of_drafting_in_turn(name):
    target, draft = sharp_pair(name, noise=0.02)
    outputs, options = [], {"do_sample": True, "temperature": 0.7, "eos_token_id": None}
    with hf_ssd.launch_draft(draft, num_threads=1) as assistant:
        for model in (assistant, draft):
            torch.manual_seed(11)
            outputs.append(comparing.generate(target, model, padded_batch(3), {"budget": 20}, **options))
    ahead, in_turn = outputs
    assert torch.equal(ahead.sequences, in_turn.sequences)
    assert ahead.ssd_stats.column("accepted") == in_turn.ssd_stats.column("accepted")
    assert ahead.ssd_stats.hit_rate > 0 and ahead.ssd_stats.tokens_per_round > 1.1


@pytest.mark.skipif("dory" not in REGISTERED, reason="this release of transformers has no Dory")
def test_the_returned_cache_of_a_model_that_repeats_its_layers_has_those_of_each_repetition():
    target, draft = sharp_pair("dory", noise=0.02)
    outputs = []
    for speculates in (settings(draft), {}):
        begun = target.generate(**padded_batch(1), **GREEDY, **speculates)
        assert not speculates or begun.ssd_stats.tokens_per_round > 1.05
        outputs.append(target.generate(begun.sequences, **{CACHE: begun[CACHE]}, **GREEDY).sequences)
    assert torch.equal(*outputs) and len(begun[CACHE].layers) > target.config.num_hidden_layers


@pytest.mark.parametrize("name, cases", [
    ("qwen3_vl", {3: [4]}),  # its tokens have several positions
    *(slowly(name, {1: [4], 3: [1, 7]}) for name in MULTIMODAL),
])  # fmt: skip
def test_text_alone_with_a_multimodal_target(name, cases):
    if name == "llama4" and CACHE == "cache":
        pytest.skip("transformers 5.24 itself raises: its outputs have no `image_outputs`")
    target, draft = sharp_pair(name, noise=0.02, kind=AutoModelForImageTextToText)
    check_target(target, None if is_recurrent(target.config) else draft, cases)


# ---------------------------------------------------------------- the list


def test_every_registered_family_is_listed():
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if version > LISTED_WITH:
        pytest.skip("this release of transformers may have families that are not listed yet")
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= set(FAMILIES)
    if version == LISTED_WITH:
        assert set(FAMILIES) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_every_word_of_the_list_is_explained():
    words = {state for states in FAMILIES.values() for state in states}
    assert words == {*REFUSED, SUPPORTED, "not_built"}


def test_the_page_of_supported_models_is_the_list():
    assert PAGE.read_text() == page(), "run `python -m tests.conformance.models`"


# ---------------------------------------------------------------- images and mutants


def test_a_prompt_with_an_image(prepared_in_process):
    """The target sees the image, the draft the tokens that stand for it."""
    target, draft = hf_ssd.enable(tiny_llava()), tiny_model()
    inputs = padded_batch(3)
    inputs["input_ids"][:, 3:7], inputs["attention_mask"][:, 3:] = 96, 1
    image = torch.randn(3, 3, 28, 28)
    options = {"pixel_values": image, "max_new_tokens": 24}
    output, plain = comparing.as_plain(target, draft, inputs, {"lookahead": 3, "budget": 8}, **options)
    assert not torch.equal(target.generate(**inputs, **{**GREEDY, "pixel_values": -image}).sequences, plain.sequences)
    assert output.ssd_stats.tokens_per_round > 1.05


def test_a_text_so_long_that_llama_4_scales_its_attention_is_refused():
    """It counts the columns of its cache, which differ between rows."""
    config = tiny_config("llama4_text")
    config.floor_scale = 200
    target = hf_ssd.enable(sharp_model(config))
    inputs, options = padded_batch(3), {**GREEDY, "max_new_tokens": 61}
    plain = target.generate(**inputs, **options)
    check_same(target.generate(**inputs, **options, **settings(tiny_model())), plain)
    with pytest.raises(ValueError, match="scales attention by the number of columns .* `max_length=70` or less"):
        target.generate(**inputs, **{**options, "max_new_tokens": 62}, **settings(tiny_model()))


@pytest.mark.parametrize("mutant", ["window", "padding"])
def test_chunks_that_begin_elsewhere_are_noticed(mutant, monkeypatch):
    if mutant == "window":
        monkeypatch.setattr(masks, "within_chunk", masks.within_window)
    else:
        monkeypatch.setattr(CachedModel, "_left_padding", lambda self: torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises((AssertionError, ValueError)):
        check_family("llama4_text", {3: [4]})


def test_a_cache_that_is_longer_than_it_should_be_is_noticed(monkeypatch):
    """The mutant for the families: rejected tokens are overwritten, but still counted."""
    place = RaggedCache.place

    def keeps_width(self, columns, width):
        widths = [layer.width for layer in self.layers]
        place(self, columns, width)
        for layer, before in zip(self.layers, widths):
            layer.width = max(before, layer.width)

    monkeypatch.setattr(RaggedCache, "place", keeps_width)
    with pytest.raises((AssertionError, RuntimeError)):
        check_family("falcon", {3: [4]})
