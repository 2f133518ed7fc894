"""Each way in which models attend and know positions: greedy outputs equal plain generate(), token for token."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

import hf_ssd
from hf_ssd.cache.ragged import RaggedCache

from ..conftest import SIZES, padded_batch, tiny_model

LATENT = {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MODELS = {
    "gpt2": {"n_inner": 64},  # learned positions
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 64},  # ... counted from 2
    "xglm": {"d_model": 32, "ffn_dim": 64, "num_layers": 3, "attention_heads": 4},  # sinusoidal ones
    "gptj": {"rotary_dim": 4},  # attention and feed-forward side by side
    "phi": {},  # rotary embeddings of a part of each head
    "gpt_bigcode": {"multi_query": True},  # one key for all heads
    "falcon": {"head_dim": None, "alibi": False},  # makes a mask where it is given none
    "gemma2": {"sliding_window": 6},  # capped logits
    "gemma3n_text": {**SLIDING, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
                     "num_kv_shared_layers": 1},  # layers that use another one's keys
    "cohere2": SLIDING,  # full layers without positions
    "olmo2": {},  # norms behind
    "mixtral": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "deepseek_v3": {**LATENT, **EXPERTS, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
                    "first_k_dense_replace": 1},  # latent attention
    "gpt_oss": {**EXPERTS, **SLIDING},  # sinks
}  # fmt: skip


def pair_of(name):
    """A sharp random model, and the same with noise on its weights."""
    config = {**SIZES, "tie_word_embeddings": False, **MODELS[name]}  # tied ones make it repeat itself
    if config["head_dim"] is None:
        del config["head_dim"]
    torch.manual_seed(0)
    target, draft = (AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **config)).eval() for _ in range(2))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter, copy in zip(target.parameters(), draft.parameters()):
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25, generator=generator)
            copy.copy_(parameter + 0.02 * torch.randn(parameter.shape, generator=generator))
    return hf_ssd.enable(target), draft


@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_plain_generate(name, prepared_in_process):
    target, draft = pair_of(name)
    for rows in (1, 3):
        inputs = padded_batch(rows)
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
        plain = target.generate(**inputs, **options)
        assert len(set(plain[:, 9:].flatten().tolist())) > 4
        for lookahead in (1, 4):
            config = hf_ssd.SSDConfig(lookahead=lookahead, budget=12, asynchronous=False)
            options |= {"assistant_model": draft, "ssd_config": config}
            output = target.generate(**inputs, **options, return_dict_in_generate=True)
            assert torch.equal(output.sequences, plain)
            assert output.ssd_stats.draft_failure is None and 1.05 < output.ssd_stats.tokens_per_round < 4.9
    assert 0.1 < sum(prepared_in_process) / len(prepared_in_process) < 1


def test_a_prompt_with_an_image(prepared_in_process):
    """The target sees the image, the draft the tokens that stand for it."""
    eyes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**eyes, image_size=28, patch_size=14)  # four patches
    config = LlavaConfig(text_config=LlamaConfig(**SIZES), vision_config=vision, image_token_index=96)
    torch.manual_seed(0)
    target, draft = hf_ssd.enable(LlavaForConditionalGeneration(config).eval()), tiny_model()
    target.model.language_model.load_state_dict(draft.model.state_dict())
    target.lm_head.load_state_dict(draft.lm_head.state_dict())
    inputs = padded_batch(3)
    inputs["input_ids"][:, 3:7], inputs["attention_mask"][:, 3:] = 96, 1
    image, options = torch.randn(3, 3, 28, 28), {"max_new_tokens": 24, "do_sample": False}
    plain = target.generate(**inputs, pixel_values=image, **options)
    assert not torch.equal(target.generate(**inputs, pixel_values=-image, **options), plain)
    config = hf_ssd.SSDConfig(lookahead=3, budget=8, asynchronous=False)
    options |= {"assistant_model": draft, "ssd_config": config, "return_dict_in_generate": True}
    output = target.generate(**inputs, pixel_values=image, **options)
    assert torch.equal(output.sequences, plain) and output.ssd_stats.tokens_per_round > 1.05


def test_a_cache_that_is_longer_than_it_should_be_is_noticed(prepared_in_process, monkeypatch):
    """The mutant for the test above: rejected tokens are overwritten, but still counted."""
    place = RaggedCache.place

    def keeps_width(self, columns, width):
        widths = [layer.width for layer in self.layers]
        place(self, columns, width)
        for layer, before in zip(self.layers, widths):
            layer.width = max(before, layer.width)

    monkeypatch.setattr(RaggedCache, "place", keeps_width)
    with pytest.raises((AssertionError, RuntimeError)):
        test_greedy_equals_plain_generate("falcon", prepared_in_process)
