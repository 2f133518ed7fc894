"""Models that differ from the usual ones: their tokens are those of plain generate(), or one sentence says why."""

import contextlib
import functools
import importlib
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig
from transformers import (
    GenerationMixin,
    GraniteConfig,
    GraniteSpeechConfig,
    GraniteSpeechForConditionalGeneration,
    LlamaForCausalLM,
)

import hf_ssd
from hf_ssd.cache import trial
from hf_ssd.cache.cache_name import CACHE
from hf_ssd.cache.packed_linear import PackedWeight
from hf_ssd.cache.readings import LowPrecision
from hf_ssd.cache.support import check_own_decoding, last_position_limit
from hf_ssd.cache.trial import check_supported
from hf_ssd.generation import draft as draft_of_a_call

from ..helpers.families import sharp_model, tiny_config
from ..helpers.packing import needs_bfloat16
from ..helpers.tiny import SIZES, padded_batch, speculated, tiny_draft, tiny_model

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
CUSTOM_GENERATE = Path(__file__).parents[2] / "custom_generate"
IN_TURN = hf_ssd.SSDConfig(lookahead=3, asynchronous=False)


# ---------------------------------------------------------------- models that the trial refuses or takes


class Deaf(LlamaForCausalLM):
    def forward(self, *args, attention_mask=None, **kwargs):
        return super().forward(*args, **kwargs)


class Forgetful(LlamaForCausalLM):
    def forward(self, *args, use_cache=None, **kwargs):
        kwargs.pop(CACHE, None)
        return super().forward(*args, **kwargs, use_cache=False)


class OtherPositions(LlamaForCausalLM):
    """Changes the inputs of each step."""

    def prepare_inputs_for_generation(self, *args, is_first_iteration=False, **kwargs):
        inputs = super().prepare_inputs_for_generation(*args, is_first_iteration=is_first_iteration, **kwargs)
        return inputs if is_first_iteration else {**inputs, "position_ids": 2 * inputs["position_ids"]}


class OtherKwargs(LlamaForCausalLM):
    def _update_model_kwargs_for_generation(self, *args, **kwargs):
        kwargs = super()._update_model_kwargs_for_generation(*args, **kwargs)
        kwargs["position_ids"][:, -1] += 1
        return kwargs


class Same(LlamaForCausalLM):
    """Prepares its inputs as transformers does."""

    def prepare_inputs_for_generation(self, *args, **kwargs):
        return super().prepare_inputs_for_generation(*args, **kwargs)


def of_class(kind):
    model = tiny_model()
    model.__class__ = kind
    return model


def with_a_window():
    """As wide as that of the public models, which no short text exceeds."""
    config = tiny_config("gpt_neo")
    config.window_size, config.max_position_embeddings = 256, 1024
    return sharp_model(config)


CHANGES = "changes its inputs in each step of generate()"
REFUSED = {
    "a mask that is ignored": (lambda: of_class(Deaf), "Deaf does not (obey|take) a 4D attention mask"),
    "nothing in the cache": (lambda: of_class(Forgetful), "it keeps no keys and values in its cache"),
    "other positions": (lambda: of_class(OtherPositions), f"OtherPositions {CHANGES}"),
    "other arguments": (lambda: of_class(OtherKwargs), f"OtherKwargs {CHANGES}"),
    "a window": (with_a_window, "does not obey .* a mask of its own from the number of columns"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_the_trial_refuses(case):
    make, words = REFUSED[case]
    with pytest.raises(ValueError, match=words.replace("()", r"\(\)")):
        check_supported(make())


def test_a_model_is_tried_once_for_each_attention_and_dtype(monkeypatch):
    tried, try_it = [], trial._try
    monkeypatch.setattr(trial, "_try", lambda model, *_: tried.append(model.dtype) or try_it(model, *_))
    model = of_class(Same)
    for change in (lambda: None, lambda: model.set_attn_implementation("eager"), model.double, lambda: None):
        change()
        check_supported(model)
    assert tried == [torch.float32, torch.float32, torch.float64]


def test_gradient_checkpointing_left_on_in_training_mode_is_refused(draft):
    target = hf_ssd.enable(tiny_model())
    target.gradient_checkpointing_enable()
    options = {"max_new_tokens": 5, "do_sample": False, "assistant_model": draft, "ssd_config": IN_TURN}
    target.generate(**padded_batch(2), **options)  # in evaluation mode it changes nothing
    target.train()
    with pytest.raises(ValueError, match=r"training mode with gradient checkpointing.*model.eval\(\)"):
        target.generate(**padded_batch(2), **options)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize("is_tried_before", [False, True])
def test_a_model_whose_logits_depend_on_the_rest_of_the_pass_drafts_and_is_no_target(is_tried_before, target):
    model = tiny_draft()
    if is_tried_before:  # and found to be sound
        check_supported(model)
    model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8, inplace=is_tried_before)
    assert speculated(target, model).ssd_stats.acceptance_rate > 0.1
    with pytest.raises(ValueError, match="depend on the other tokens and rows.*quantize_dynamic"):
        hf_ssd.enable(model).generate(**padded_batch(2), **GREEDY, assistant_model=target, ssd_config=IN_TURN)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "mistral", "gemma3_text", "gpt2", "mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3"]
)
def test_rounding_is_no_reason_to_refuse_a_model(family, dtype):
    for noise in (0.0, 0.02):
        check_supported(sharp_model(tiny_config(family), noise=noise).to(dtype))


def test_the_passes_of_a_trial_are_packed_as_those_of_the_call(monkeypatch):
    products, product = [], PackedWeight.product
    monkeypatch.setattr(PackedWeight, "product", lambda self, *inputs: products.append(1) or product(self, *inputs))
    check_supported(tiny_model())
    assert not products
    check_supported(tiny_model(), pack_weights=True)
    assert products


def test_a_model_in_float32_under_autocast_is_not_refused():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_supported(tiny_model())


def test_a_config_without_a_cache_is_named(draft):
    target = hf_ssd.enable(tiny_model(use_cache=False))
    speculated(target, draft, use_cache=True)
    options = {**padded_batch(1), "max_new_tokens": 5, "assistant_model": draft, "ssd_config": IN_TURN}
    with pytest.raises(ValueError, match="in the model's own config; pass `use_cache=True`"):
        target.generate(**options)
    with pytest.raises(ValueError, match="use_cache=False.$"):
        hf_ssd.enable(tiny_model()).generate(**options, use_cache=False)


def gpt2(positions):
    config = tiny_config("gpt2")
    config.n_positions = positions
    model = sharp_model(config)
    with torch.no_grad():
        model.transformer.wpe.weight[:] = 0.0
    return model


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_draft_with_fewer_positions_drafts_up_to_its_limit(is_ahead, monkeypatch):
    target, draft, said = hf_ssd.enable(gpt2(256)), gpt2(32), []
    monkeypatch.setattr(draft_of_a_call.logger, "warning_once", said.append)
    options = {"inputs": torch.randint(1, 97, (1, 10)), **GREEDY, "max_new_tokens": 60}
    with hf_ssd.launch_draft(draft) if is_ahead else contextlib.nullcontext(draft) as drafts:
        config = hf_ssd.SSDConfig(lookahead=3, asynchronous=is_ahead)
        output = target.generate(**options, assistant_model=drafts, ssd_config=config, return_dict_in_generate=True)
    assert torch.equal(output.sequences, target.generate(**options)) and output.ssd_stats.draft_failure is None
    drafted = output.ssd_stats.column("lookahead")
    assert drafted[0] == 3 and not any(drafted[-30:])
    assert set(said) == {"The draft has 32 positions; what is longer is decoded plainly."}


def test_a_limit_is_that_of_a_table_of_positions():
    """Rotary embeddings that are computed and layers without positions go on after the config's number."""
    for family in ("gpt2", "opt", "gptj", "codegen", "biogpt", "gpt_bigcode", "ctrl", "xglm"):
        assert last_position_limit(sharp_model(tiny_config(family))) == 256, family
    for family in ("llama", "falcon", "gpt_neox", "mixtral", "bloom", "inkling_text"):
        assert last_position_limit(sharp_model(tiny_config(family))) is None, family
    as_many = {name: 64 for name in ("vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size")}
    assert last_position_limit(tiny_model(**as_many)) is None


# ---------------------------------------------------------------- classes with methods of their own


class WithSystemPrompt(LlamaForCausalLM):
    """A class whose generate() puts a system prompt before every text."""

    def generate(self, inputs=None, **kwargs):
        inputs = kwargs.pop("input_ids", inputs)
        return super().generate(torch.cat([torch.tensor([[5, 6, 7, 8]]).expand(len(inputs), -1), inputs], 1), **kwargs)


WAYS = {
    "hf_ssd.generate": lambda model: functools.partial(hf_ssd.generate, model),
    "enabled": lambda model: hf_ssd.enable(model).generate,
    "hf_ssd.generate, enabled": lambda model: functools.partial(hf_ssd.generate, hf_ssd.enable(model)),
    "custom_generate": lambda model: functools.partial(
        model.generate, custom_generate=str(CUSTOM_GENERATE), trust_remote_code=True
    ),
    "a function": lambda model: functools.partial(hf_ssd.enable(model).generate, custom_generate=hf_ssd.generate),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_class_with_a_generate_of_its_own_is_called_by_it(way, draft):
    model, ids = of_class(WithSystemPrompt), {"input_ids": padded_batch(2)["input_ids"]}
    found = speculated(model, draft, ids, generate=WAYS[way](model), least=1.2, **GREEDY).sequences
    assert not torch.equal(found[:, 4:], LlamaForCausalLM.generate(model, **ids, **GREEDY, max_new_tokens=20))


@pytest.fixture
def granite_speech(monkeypatch):
    """Its LoRA adapter is for sound, so its generate() switches the adapter on and off."""
    # transformers 5.24 asks for a release of peft that is newer than the newest one.
    monkeypatch.setattr(transformers.integrations.peft, "check_peft_version", lambda min_version: None)
    text = GraniteConfig(**{**SIZES, "num_key_value_heads": 4})
    encoder = {"input_dim": 8, "num_layers": 1, "hidden_dim": 16, "num_heads": 2, "context_size": 15, "max_pos_emb": 16}
    projector = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = GraniteSpeechConfig(
        text_config=text, encoder_config=encoder, projector_config={**projector, "encoder_hidden_size": 16},
        audio_token_index=96, initializer_range=0.25,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GraniteSpeechForConditionalGeneration(config).eval()
    model.add_adapter(LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False))
    return model.eval()


@pytest.mark.parametrize("has_sound", [False, True])
def test_granite_speech_switches_its_adapter(has_sound, granite_speech, draft):
    model, generator = granite_speech, torch.Generator().manual_seed(0)
    options = {"input_ids": torch.randint(2, 90, (1, 12), generator=generator), **GREEDY, "max_new_tokens": 16}
    if has_sound:
        options["input_ids"][:, 2:5] = 96
        options["input_features"] = torch.randn(1, 15, 8, generator=generator)
    plain = model.generate(**options)
    model.disable_adapters() if has_sound else model.enable_adapters()
    assert not torch.equal(GenerationMixin.generate(model, **options), plain)
    model.disable_adapters() if has_sound else model.enable_adapters()
    settings = {"assistant_model": model if has_sound else draft, "ssd_config": IN_TURN}
    output = hf_ssd.generate(model, **options, **settings, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain) and output.ssd_stats.tokens_per_round >= 1
    assert output.ssd_stats.draft_failure is None and len(output.ssd_stats.records) > 1


@pytest.mark.parametrize("name", ["_sample", "_has_unfinished_sequences"])
def test_a_class_that_decodes_by_itself_is_refused(name, draft):
    model = of_class(type("Own", (LlamaForCausalLM,), {name: lambda self, *given, **others: False}))
    for generate in (functools.partial(hf_ssd.generate, model), hf_ssd.enable(model).generate):
        with pytest.raises(ValueError, match=f"Own decodes by a `{name}` of its own"):
            generate(**padded_batch(1), **GREEDY, assistant_model=draft, ssd_config=IN_TURN)


@pytest.mark.parametrize("module", ["csm", "higgs_audio_v2", "pocket_tts", "vibevoice"])
def test_classes_of_transformers_that_decode_by_themselves_are_refused(module):
    if importlib.util.find_spec(f"transformers.models.{module}") is None:
        pytest.skip("this release of transformers does not have the family")
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    kind = next(one for name, one in vars(modeling).items() if name.endswith("ForConditionalGeneration"))
    with pytest.raises(ValueError, match=f"{kind.__name__} decodes by a `_sample` of its own"):
        check_own_decoding(kind.__new__(kind))


# ---------------------------------------------------------------- accelerate


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)  # a trainer of another test may have set it
    yield Accelerator(mixed_precision="bf16", cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("is_bound_before", [True, False])
def test_a_model_prepared_for_mixed_precision_speculates(is_bound_before, accelerator, draft):
    model, options = tiny_model(), {**padded_batch(3), **GREEDY, "max_new_tokens": 18}
    if is_bound_before:
        hf_ssd.enable(model, draft, IN_TURN)
    model = accelerator.prepare(model)
    if not is_bound_before:
        hf_ssd.enable(model, draft, IN_TURN)
    output = model.generate(**options, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(output.sequences, model.generate(**options, ssd_config=None))
    assert output.logits[0].dtype == torch.float32 and output.ssd_stats.tokens_per_round > 1.2


@needs_bfloat16
def test_the_tolerance_is_that_of_the_precision_in_which_matrices_are_multiplied(accelerator, monkeypatch):
    """Float32 without autocast keeps its own tolerance: what it is given is not looser than before."""
    used, same = [], trial._are_same
    monkeypatch.setattr(
        trial, "_are_same", lambda ours, theirs, precise: used.append(precise) or same(ours, theirs, precise)
    )
    model = tiny_model()
    check_supported(model)
    assert all(used) and used
    check_supported(accelerator.prepare(model))
    assert not used[-1]
    monkeypatch.setattr(LowPrecision, "is_used", property(lambda self: False, lambda self, value: None), False)
    with pytest.raises(ValueError, match="does not obey a 4D attention mask"):
        check_supported(accelerator.prepare(tiny_model()))
