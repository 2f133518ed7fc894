"""Bad use gets one clear sentence, before any work starts."""

import copy
import re
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
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

from ..helpers.families import tiny_config
from ..helpers.tiny import SIZES, padded_batch, tiny_draft, tiny_model

CONFIG = hf_ssd.SSDConfig(lookahead=2, budget=4)
IN_TURN = hf_ssd.SSDConfig(lookahead=2, budget=4, asynchronous=False)
SYNTH_ID = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3], skip_first_ngram_calls=True)


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    """Neither a worker nor a prefill."""

    def started(*args, **kwargs):
        raise AssertionError("work was started")

    monkeypatch.setattr("hf_ssd.distributed.launch.Child.__init__", started)
    monkeypatch.setattr("hf_ssd.generation.target.Target.prefill", started)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_beams": 2}, "beam_search"),
        ({"num_beams": 2, "do_sample": True}, "beam_sample"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "static"}, "remove the static cache"),
        ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"watermarking_config": SYNTH_ID}, "SynthIDTextWatermarkLogitsProcessor .it remembers earlier calls"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"prompt_lookup_num_tokens": 3}, "`prompt_lookup_num_tokens`; remove it; SSDConfig.drafter=.ngram.. looks"),
        ({"assistant_early_exit": 1}, "`assistant_early_exit`; remove it: the draft is `assistant_model`"),
        ({"dola_layers": "high"}, "dola_generation"),
        ({"force_words_ids": [[5]], "num_beams": 2}, "constrained_beam_search"),
        ({"input_ids": torch.ones(1, 0, dtype=torch.long), "attention_mask": None}, "`input_ids` is empty"),
        ({"assistant_model": None}, "needs an `assistant_model`"),
        ({"assistant_model": 5}, "must be a transformers model, a folder or hub id, or what hf_ssd.launch_draft"),
        ({"assistant_model": "no/such/draft"}, "There is no folder 'no/such/draft'"),
        ({"assistant_model": Path(__file__).parent}, "is a folder without a model"),
        ({"ssd_config": 3}, "must be an hf_ssd.SSDConfig or a dict, but is a int"),
        ({"ssd_config": {"lookahed": 3}}, "did you mean 'lookahead'"),
        ({"num_assistant_tokens": 4}, "`num_assistant_tokens` is a setting of transformers' assisted generation"),
        ({"num_assistant_tokens_schedule": "constant"}, "`num_assistant_tokens_schedule` is a setting"),
        ({"generation_config": GenerationConfig(assistant_confidence_threshold=0.4)}, "SSDConfig.lookahead=...."),
    ],
)
def test_options_that_cannot_be_combined(target, draft, options, words):
    options = {"max_new_tokens": 5, "assistant_model": draft, "ssd_config": CONFIG, **options}
    with pytest.raises((ValueError, TypeError), match=words):
        target.generate(**{**padded_batch(1), **options})


def test_embeddings_instead_of_tokens(target, draft):
    embeddings = target.get_input_embeddings()(padded_batch(1)["input_ids"])
    with pytest.raises(ValueError, match="inputs_embeds .the draft needs `input_ids`"):
        target.generate(inputs_embeds=embeddings, max_new_tokens=5, assistant_model=draft, ssd_config=CONFIG)


def test_static_cache_objects(target, draft):
    cache = StaticCache(config=target.config, max_cache_len=64)
    with pytest.raises(ValueError, match="remove the StaticCache cache"):
        target.generate(**padded_batch(1), max_new_tokens=5, **{CACHE: cache}, assistant_model=draft, ssd_config=CONFIG)


@pytest.mark.parametrize(
    "processor",
    [
        UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, None),
        DiaEOSDelayPatternLogitsProcessor([0, 2], eos_token_id=5, max_generation_len=20),
    ],
)
def test_processors_that_remember_earlier_calls(target, draft, processor):
    with pytest.raises(ValueError, match=f"combined with {type(processor).__name__} .it remembers earlier calls"):
        target.generate(
            **padded_batch(1), max_new_tokens=5, logits_processor=[processor], assistant_model=draft, ssd_config=CONFIG
        )


@pytest.mark.parametrize("detected_by", ["is_deepspeed_zero3_enabled", "is_fsdp_managed_module"])
@pytest.mark.parametrize(
    "world_size, synced_gpus, words",
    [(2, None, "`synced_gpus` .FSDP, DeepSpeed"), (2, False, "work was started"), (1, None, "work was started")],
)
def test_ranks_that_share_weights_are_detected_as_in_transformers(
    target, draft, monkeypatch, detected_by, world_size, synced_gpus, words
):
    monkeypatch.setattr(generation_utils, detected_by, lambda *_: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)
    options = {"max_new_tokens": 5, "synced_gpus": synced_gpus, "assistant_model": draft, "ssd_config": IN_TURN}
    with pytest.raises((ValueError, AssertionError), match=words):
        target.generate(**padded_batch(1), **options)


def recurrent():
    return MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=97))


def encoder_decoder():
    return T5ForConditionalGeneration(T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))


@pytest.mark.parametrize(
    "model, words",
    [(recurrent, "recurrent"), (encoder_decoder, "encoder-decoder")],
)
@pytest.mark.parametrize("side", ["target", "draft"])
def test_models_that_cannot_take_part(model, words, side):
    target, draft = (model(), tiny_draft()) if side == "target" else (tiny_model(), model())
    with pytest.raises(ValueError, match=words):
        hf_ssd.enable(target).generate(**padded_batch(1), max_new_tokens=5, assistant_model=draft, ssd_config=CONFIG)


@pytest.mark.parametrize("side", ["target", "draft"])
def test_models_whose_dropout_is_at_work(side):
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=97)
    models = {"target": hf_ssd.enable(GPT2LMHeadModel(config)).eval(), "draft": GPT2LMHeadModel(config).eval()}
    for model in models.values():
        check_supported(model)
    models[side].train()
    options = {"max_new_tokens": 5, "assistant_model": models["draft"], "ssd_config": CONFIG}
    with pytest.raises(ValueError, match="GPT2LMHeadModel is in training mode.*call model.eval()"):
        models["target"].generate(**padded_batch(1), **options)


def test_a_target_whose_positions_are_no_input(draft):
    target = hf_ssd.enable(BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=16, n_layer=1, n_head=2)))
    with pytest.raises(ValueError, match="BloomForCausalLM takes no `position_ids`"):
        target.generate(**padded_batch(1), max_new_tokens=5, assistant_model=draft, ssd_config=CONFIG)


def test_an_attention_that_takes_no_masks(draft, monkeypatch):
    target = hf_ssd.enable(tiny_model())
    check_supported(target)  # with the attention that it has now
    monkeypatch.setattr(target.config, "_attn_implementation_internal", "flex_attention")
    with pytest.raises(ValueError, match='which takes no 4D masks; load it with attn_implementation="sdpa"'):
        target.generate(**padded_batch(1), max_new_tokens=5, assistant_model=draft, ssd_config=CONFIG)


def test_tokens_with_several_different_positions(draft):
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen2_5_VLConfig(text_config={**SIZES, "rope_parameters": rope}, vision_config=vision)
    target = hf_ssd.enable(Qwen2_5_VLForConditionalGeneration(config))
    positions = torch.arange(9).repeat(4, 1, 1)
    positions[1, 0, 3:5] = 3  # an image
    options = {**padded_batch(1), "max_new_tokens": 5, "assistant_model": draft, "ssd_config": CONFIG}
    with pytest.raises(ValueError, match="tokens that have several different positions each"):
        target.generate(**options, position_ids=positions)


def test_options_of_the_model_itself_are_not_of_this_call(draft):
    target = hf_ssd.enable(tiny_model())
    target.generation_config.num_assistant_tokens = 4
    options = {"max_new_tokens": 5, "assistant_model": draft, "ssd_config": IN_TURN}
    for generation_config in (None, copy.deepcopy(target.generation_config)):
        with pytest.raises(AssertionError, match="work was started"):
            target.generate(**padded_batch(1), generation_config=generation_config, **options)


def test_a_model_that_was_not_enabled(draft):
    """Transformers' own words stand in docs/troubleshooting.md; where we are asked, ours name the remedy."""
    target, options = tiny_model(), {**padded_batch(1), "max_new_tokens": 5}
    guide = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    words = "The following `model_kwargs` are not used by the model: ['ssd_config']"
    assistant = object.__new__(hf_ssd.DraftAssistant)
    for given in (draft, assistant, "no/such/draft"):
        with pytest.raises(ValueError, match=re.escape(words)):
            target.generate(**options, assistant_model=given, ssd_config=CONFIG)
    assert words in guide
    with pytest.raises(ValueError, match="hf_ssd.enable.model. has prepared"):
        target.generate(**options, assistant_model=assistant)
    with pytest.raises(ValueError, match="call hf_ssd.generate.model, .* itself, or hf_ssd.enable.model. before"):
        target.generate(**options, assistant_model=draft, ssd_config=CONFIG, custom_generate=hf_ssd.generate)


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "cpu:1"])
def test_a_device_that_is_not_there(device):
    for place in ({"device": device}, {"devices": ["cpu", device]}):
        with pytest.raises(ValueError, match=f"This machine has no device '{device}', only cpu"):
            hf_ssd.launch_draft(tiny_draft(), **place)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ValueError, match="is a folder without a model that transformers can load: ") as error:
        hf_ssd.launch_draft(tmp_path)
    assert "\n" not in str(error.value)


def test_load_options_that_no_worker_can_be_told_of(tmp_path):
    with pytest.raises(TypeError, match="`quantization_config` is a object, which cannot be sent to the worker"):
        hf_ssd.launch_draft(tmp_path, quantization_config=object())


def test_drafts_whose_layers_a_worker_cannot_rebuild(target):
    """Adapters and quantization change the layers of a model, not its class."""
    draft = tiny_draft()
    adapter = type("Linear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    draft.model.layers[0].mlp.up_proj.__class__ = adapter
    options = {**padded_batch(1), "max_new_tokens": 5, "assistant_model": draft}
    with pytest.raises(ValueError, match="merge them with draft.merge_and_unload.., or draft in this process"):
        hf_ssd.launch_draft(draft)
    for config in (CONFIG, IN_TURN):  # in this process it works as it is
        with pytest.raises(AssertionError, match="work was started"):
            target.generate(**options, ssd_config=config)
    draft = tiny_draft()
    draft.hf_quantizer = object()  # transformers leaves it in a model that it has dequantized
    recipe_for(draft)
    draft.model.layers[0].mlp.up_proj.__class__ = type("Linear4bit", (torch.nn.Linear,), {})
    with pytest.raises(ValueError, match="let the worker load it, by hf_ssd.launch_draft"):
        hf_ssd.launch_draft(draft)


def test_what_cannot_be_enabled():
    with pytest.raises(TypeError, match="not a Linear"):
        hf_ssd.enable(torch.nn.Linear(2, 2))


def test_inputs_that_plain_generation_feeds_with_every_token(draft):
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=97, add_cross_attention=True)
    target = hf_ssd.enable(GPT2LMHeadModel(config).eval())
    seen = {"encoder_hidden_states": torch.zeros(1, 3, 16)}
    with pytest.raises(ValueError, match="encoder_hidden_states .an input that plain generation feeds"):
        target.generate(**padded_batch(1), **seen, max_new_tokens=5, assistant_model=draft, ssd_config=CONFIG)


def test_stop_strings_of_the_model_itself(draft):
    target = hf_ssd.enable(tiny_model())
    target.generation_config.stop_strings = ["x"]
    with pytest.raises(ValueError, match="set model.generation_config.stop_strings = None"):
        target.generate(**padded_batch(1), max_new_tokens=5, assistant_model=draft, ssd_config=CONFIG)


def test_streaming_a_batch(target, draft):
    with pytest.raises(ValueError, match="batch size 1"):
        target.generate(
            **padded_batch(2), max_new_tokens=5, streamer=TextStreamer(None), assistant_model=draft, ssd_config=CONFIG
        )


def test_flash_attention_with_a_batch(target, draft, monkeypatch):
    monkeypatch.setattr("hf_ssd.generation.checks.is_flash_attention", lambda model: True)
    with pytest.raises(ValueError, match='attn_implementation="sdpa"'):
        target.generate(**padded_batch(2), max_new_tokens=5, assistant_model=draft, ssd_config=CONFIG)


def test_a_draft_with_flash_attention_in_the_target_s_process_with_a_batch(target, draft, monkeypatch):
    monkeypatch.setattr("hf_ssd.generation.checks.is_flash_attention", lambda model: model is draft)
    in_turn = hf_ssd.SSDConfig(lookahead=3, budget=4, asynchronous=False)
    with pytest.raises(ValueError, match='load the draft with attn_implementation="sdpa"'):
        target.generate(**padded_batch(2), max_new_tokens=5, assistant_model=draft, ssd_config=in_turn)
    with pytest.raises(AssertionError, match="work was started"):  # one row needs no masks
        target.generate(**padded_batch(1), max_new_tokens=5, assistant_model=draft, ssd_config=in_turn)


def test_an_assistant_without_ssd_config(target, draft):
    assistant = object.__new__(hf_ssd.DraftAssistant)
    with pytest.raises(ValueError, match="pass `ssd_config=hf_ssd.SSDConfig"):
        target.generate(**padded_batch(1), max_new_tokens=5, assistant_model=assistant)


@pytest.mark.parametrize("family", ["deepseek_v32", "qwen3_next"])
def test_a_cache_without_the_models_kinds_of_layers(family):
    target = hf_ssd.enable(AutoModelForCausalLM.from_config(tiny_config(family)).eval())
    with pytest.raises(ValueError, match="`DynamicCache\\(\\)` has no layers of the kinds .*config=model.config"):
        target.generate(**padded_batch(1), **{CACHE: DynamicCache()}, assistant_model=tiny_draft(), ssd_config=IN_TURN)


def test_sparse_attention_with_flash_attention():
    target = hf_ssd.enable(AutoModelForCausalLM.from_config(tiny_config("deepseek_v32")).eval())
    target.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="has sparse attention, which is not supported"):
        target.generate(**padded_batch(1), assistant_model=tiny_draft(), ssd_config=IN_TURN)
