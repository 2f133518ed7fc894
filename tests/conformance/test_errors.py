"""Bad use gets one clear sentence, before any work starts."""

import copy
import re
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    StaticCache,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
    TextStreamer,
)
from transformers.generation import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation import utils as generation_utils
from transformers.generation.logits_process import DiaEOSDelayPatternLogitsProcessor

import hf_ssd
from hf_ssd.cache.cache_name import CACHE
from hf_ssd.cache.trial import check_supported
from hf_ssd.distributed.weights import recipe_for

from ..helpers.families import sharp_model, tiny_config
from ..helpers.tiny import SIZES, padded_batch, tiny_draft, tiny_model

CONFIG = hf_ssd.SSDConfig(lookahead=2, budget=4)
IN_TURN = hf_ssd.SSDConfig(lookahead=2, budget=4, asynchronous=False)
SYNTH_ID = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3], skip_first_ngram_calls=True)
DELAYS = DiaEOSDelayPatternLogitsProcessor([0, 2], eos_token_id=5, max_generation_len=20)
NO_ROWS = torch.zeros(0, 4, dtype=torch.long)


class NeedsMore:
    def propose(self, input_ids, lookahead, hidden_states):
        raise AssertionError("never asked")


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    """Neither a worker nor a prefill."""

    def started(*args, **kwargs):
        raise AssertionError("work was started")

    monkeypatch.setattr("hf_ssd.distributed.launch.Child.__init__", started)
    monkeypatch.setattr("hf_ssd.generation.target.Target.prefill", started)


def refused(words, target=None, draft=None, **options):
    """A call with this target and draft, tiny ones by default, says these words and starts nothing."""
    target, draft = hf_ssd.enable(target or tiny_model()), draft or tiny_draft()
    options = {**padded_batch(1), "max_new_tokens": 5, "assistant_model": draft, "ssd_config": CONFIG, **options}
    with pytest.raises((ValueError, TypeError), match=words):
        target.generate(**options)


def started(target, draft, **options):
    options = {**padded_batch(1), "max_new_tokens": 5, "assistant_model": draft, "ssd_config": IN_TURN, **options}
    with pytest.raises(AssertionError, match="work was started"):
        target.generate(**options)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_beams": 2}, "beam_search"),
        ({"num_beams": 2, "do_sample": True}, "beam_sample"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "static"}, "remove the static cache"),
        ({CACHE: StaticCache(config=LlamaConfig(**SIZES), max_cache_len=64)}, "remove the StaticCache cache"),
        ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"watermarking_config": SYNTH_ID}, "SynthIDTextWatermarkLogitsProcessor .it remembers earlier calls"),
        ({"logits_processor": [UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, None)]}, "it remembers earlier"),
        ({"logits_processor": [DELAYS]}, "combined with DiaEOSDelayPatternLogitsProcessor .it remembers earlier calls"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"prompt_lookup_num_tokens": 3}, "`prompt_lookup_num_tokens`; remove it; SSDConfig.drafter=.ngram.. looks"),
        ({"assistant_early_exit": 1}, "`assistant_early_exit`; remove it: the draft is `assistant_model`"),
        ({"dola_layers": "high"}, "dola_generation"),
        ({"force_words_ids": [[5]], "num_beams": 2}, "constrained_beam_search"),
        ({"input_ids": torch.ones(1, 0, dtype=torch.long), "attention_mask": None}, "`input_ids` is empty"),
        ({"input_ids": NO_ROWS, "attention_mask": NO_ROWS}, r"^`input_ids` has no rows; give at least one prompt\.$"),
        ({"input_ids": None, "inputs_embeds": torch.ones(1, 9, 32)}, "inputs_embeds .the draft needs `input_ids`"),
        ({**padded_batch(2), "streamer": TextStreamer(None)}, "batch size 1"),
        ({"stop_strings": ["x"]}, "pass `tokenizer=...`"),
        ({"assistant_model": None}, "needs an `assistant_model`"),
        ({"assistant_model": 5}, "must be a transformers model, a folder or hub id, or what hf_ssd.launch_draft"),
        ({"assistant_model": "no/such/draft"}, "There is no folder 'no/such/draft'"),
        ({"assistant_model": Path(__file__).parent}, "is a folder without a model"),
        ({"ssd_config": 3}, "must be an hf_ssd.SSDConfig or a dict, but is a int"),
        ({"ssd_config": {"lookahed": 3}}, "did you mean 'lookahead'"),
        ({"ssd_config": {"drafter": "parallel"}}, "no `pard_token`"),
        ({"ssd_config": {"drafter": "fast"}}, "is 'fast', but must be .auto., .autoregressive., .parallel."),
        ({"assistant_model": tiny_draft(pard_token=97)}, "is 97, which is not in its vocabulary of 97 tokens"),
        ({"assistant_model": tiny_draft(pard_token="<mask>")}, "is '<mask>', which is not in its vocabulary"),
        ({"ssd_config": hf_ssd.SSDConfig(fallback=NeedsMore())}, "`fallback` is a NeedsMore, which cannot propose"),
        ({"num_assistant_tokens": 4}, "`num_assistant_tokens` is a setting of transformers' assisted generation"),
        ({"num_assistant_tokens_schedule": "constant"}, "`num_assistant_tokens_schedule` is a setting"),
        ({"generation_config": GenerationConfig(assistant_confidence_threshold=0.3)}, "SSDConfig.lookahead=...."),
        ({"do_sample": True, "num_return_sequences": 4097}, "up to 4,096 rows, and not 4,097; give fewer rows at a ti"),
        ({"do_sample": True, "max_new_tokens": 2**22 - 130}, "up to 4,194,304 positions.*; set a smaller `max_length`"),
    ],
)
def test_options_that_cannot_be_combined(target, draft, options, words):
    refused(words, target, **{"assistant_model": draft, **options})


def test_a_sampled_call_of_a_huge_vocabulary_is_refused_and_greedy_calls_have_no_such_limits():
    target = tiny_model()
    target.config.vocab_size = 2**20 + 1
    options = {"assistant_model": None, "ssd_config": {"lookahead": 0}}
    words = "can sample with up to 1,048,576 tokens in the vocabulary, and not 1,048,577; decode with `do_sample=False`"
    refused(words, target, **options, do_sample=True)
    started(hf_ssd.enable(target), None, **options, **padded_batch(4097), max_new_tokens=2**22)


# ---------------------------------------------------------------- models: the arguments of a call, and its words


def of_family(family, attention=None, trains=False, kind=AutoModelForCausalLM, **changes):
    config = tiny_config(family)
    config.update(changes)
    model = sharp_model(config, kind=kind)
    if attention is not None:
        model.config._attn_implementation = attention
    if trains:
        check_supported(model)
        model.train()  # so that its dropout is at work
    return model


def encoder_decoder():
    return T5ForConditionalGeneration(T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))


def attention_without_masks():
    target = tiny_model()
    check_supported(target)  # with the attention that it has now
    target.config._attn_implementation_internal = "flex_attention"
    return target


def several_positions():
    positions = torch.arange(9).repeat(4, 1, 1)
    positions[1, 0, 3:5] = 3  # an image
    return {"target": of_family("qwen2_5_vl", kind=AutoModelForImageTextToText), "position_ids": positions}


def stops_by_itself():
    target = tiny_model()
    target.generation_config.stop_strings = ["x"]
    return target


FORGETS = "other logits for several tokens behind its recurrent state"
TRAINS = "GPT2LMHeadModel is in training mode.*call model.eval()"
KINDS = "`DynamicCache\\(\\)` has no layers of the kinds .*config=model.config"
MODELS = [
    *[(lambda make=make, side=side: {side: make()}, words) for side in ("target", "draft")
      for make, words in ((lambda: of_family("mamba"), "recurrent"), (encoder_decoder, "encoder-decoder"))],
    (lambda: {"target": of_family("gpt2", trains=True)}, TRAINS),
    (lambda: {"draft": of_family("gpt2", trains=True)}, TRAINS),
    (lambda: {"target": of_family("bloom")}, "BloomForCausalLM takes no `position_ids`"),
    (lambda: {"target": attention_without_masks()},
     'which takes no 4D masks; load it with attn_implementation="sdpa"'),
    (several_positions, "tokens that have several different positions each"),
    (lambda: {"target": of_family("gpt2", add_cross_attention=True), "encoder_hidden_states": torch.zeros(1, 3, 32)},
     "encoder_hidden_states .an input that plain generation feeds"),
    (lambda: {"target": stops_by_itself()}, "set model.generation_config.stop_strings = None"),
    (lambda: {"target": of_family("deepseek_v32"), CACHE: DynamicCache()}, KINDS),
    (lambda: {"target": of_family("qwen3_next"), CACHE: DynamicCache()}, KINDS),
    (lambda: {"target": of_family("deepseek_v32", "flash_attention_2")}, "has sparse attention, which is not"),
    (lambda: {"target": of_family("lfm2", "flash_attention_2")}, "has recurrent layers, which is not supported"),
    # Mamba-1 begins anew where several tokens are fed; recurrent_gemma keeps its state outside of the cache
    *[(lambda side=side: {side: of_family("jamba")}, FORGETS) for side in ("target", "draft")],
    (lambda: {"target": of_family("recurrent_gemma")}, f"{FORGETS}|keeps no recurrent state in|does not take a 4D"),
]  # fmt: skip


@pytest.mark.parametrize("arguments, words", MODELS)
def test_models_that_cannot_take_part(arguments, words):
    refused(words, **{"ssd_config": IN_TURN, **arguments()})


@pytest.mark.parametrize("detected_by", ["is_deepspeed_zero3_enabled", "is_fsdp_managed_module"])
@pytest.mark.parametrize(
    "world_size, synced_gpus, words", [(2, None, "`synced_gpus` .FSDP, DeepSpeed"), (2, False, None), (1, None, None)]
)
def test_ranks_that_share_weights_are_detected_as_in_transformers(
    target, draft, monkeypatch, detected_by, world_size, synced_gpus, words
):
    monkeypatch.setattr(generation_utils, detected_by, lambda *_: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)
    if words is None:
        started(target, draft, synced_gpus=synced_gpus)
    else:
        refused(words, target, draft, synced_gpus=synced_gpus)


def test_options_of_the_model_itself_and_defaults_that_a_pipeline_writes_are_not_of_this_call(draft):
    target = hf_ssd.enable(tiny_model())
    target.generation_config.num_assistant_tokens = 4
    defaults = GenerationConfig(**GenerationConfig._get_default_generation_params())
    for generation_config in (None, copy.deepcopy(target.generation_config), defaults):
        started(target, draft, generation_config=generation_config)


@pytest.mark.parametrize(
    "of, words", [("target", 'attn_implementation="sdpa"'), ("draft", "load the draft with attn_")]
)
def test_flash_attention_with_a_batch(target, draft, monkeypatch, of, words):
    flash = target if of == "target" else draft  # in the target's process
    monkeypatch.setattr("hf_ssd.generation.checks.is_flash_attention", lambda model: model is flash)
    refused(words, target, draft, ssd_config=IN_TURN, **padded_batch(2))
    if of == "draft":
        started(target, draft)  # one row needs no masks


# ---------------------------------------------------------------- before a call


def test_a_model_that_was_not_enabled(draft):
    """Transformers' own words stand in docs/troubleshooting.md; where we are asked, ours name the remedy."""
    target, options = tiny_model(), {**padded_batch(1), "max_new_tokens": 5}
    words = "The following `model_kwargs` are not used by the model: ['ssd_config']"
    assert words in (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    assistant = object.__new__(hf_ssd.DraftAssistant)
    for given in (draft, assistant, "no/such/draft"):
        with pytest.raises(ValueError, match=re.escape(words)):
            target.generate(**options, assistant_model=given, ssd_config=CONFIG)
    with pytest.raises(ValueError, match="hf_ssd.enable.model. has prepared"):
        target.generate(**options, assistant_model=assistant)
    with pytest.raises(ValueError, match="call hf_ssd.generate.model, .* itself, or hf_ssd.enable.model. before"):
        target.generate(**options, assistant_model=draft, ssd_config=CONFIG, custom_generate=hf_ssd.generate)
    with pytest.raises(ValueError, match="pass `ssd_config=hf_ssd.SSDConfig"):
        hf_ssd.enable(target).generate(**options, assistant_model=assistant)


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "cpu:1"])
def test_a_device_that_is_not_there(device):
    for place in ({"device": device}, {"devices": ["cpu", device]}):
        with pytest.raises(ValueError, match=f"This machine has no device '{device}', only cpu"):
            hf_ssd.launch_draft(tiny_draft(), **place)


def test_what_no_worker_can_load(tmp_path):
    with pytest.raises(ValueError, match="is a folder without a model that transformers can load: ") as error:
        hf_ssd.launch_draft(tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(TypeError, match="`quantization_config` is a object, which cannot be sent to the worker"):
        hf_ssd.launch_draft(tmp_path, quantization_config=object())


def test_drafts_whose_layers_a_worker_cannot_rebuild(target):
    """Adapters and quantization change the layers of a model, not its class. In this process they work as they are."""
    draft = tiny_draft()
    adapter = type("Linear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    draft.model.layers[0].mlp.up_proj.__class__ = adapter
    with pytest.raises(ValueError, match="merge them with draft.merge_and_unload.., or draft in this process"):
        hf_ssd.launch_draft(draft)
    for config in (CONFIG, IN_TURN):
        started(target, draft, ssd_config=config)
    draft = tiny_draft()
    draft.hf_quantizer = object()  # transformers leaves it in a model that it has dequantized
    recipe_for(draft)
    draft.model.layers[0].mlp.up_proj.__class__ = type("Linear4bit", (torch.nn.Linear,), {})
    with pytest.raises(ValueError, match="let the worker load it, by hf_ssd.launch_draft"):
        hf_ssd.launch_draft(draft)


def test_what_cannot_be_enabled():
    with pytest.raises(TypeError, match="not a Linear"):
        hf_ssd.enable(torch.nn.Linear(2, 2))
