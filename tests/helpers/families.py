"""A tiny model of each family of transformers, made from its own config without knowing the family."""

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

import hf_ssd

WINDOW = 6  # positions, which a short text exceeds
WIDTH, FEED_FORWARD, LAYERS, HEADS, HEAD_DIM, EXPERTS, POSITIONS, VOCAB = 32, 64, 2, 4, 8, 4, 256, 97
NAMES = {
    WIDTH: "hidden_size d_model n_embd embed_dim emb_dim hidden_dim word_embed_proj_dim embedding_size "
    "moe_intermediate_size shared_expert_intermediate_size input_embedding_size output_embedding_size",
    FEED_FORWARD: "intermediate_size ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size dff dim_ff",
    LAYERS: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_key_value_heads num_experts_per_tok moe_k moe_topk moe_top_k type_vocab_size "
    "sliding_window_pattern linear_num_key_heads linear_num_value_heads",
    HEADS: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "attention_heads num_decoder_attention_heads num_encoder_attention_heads num_experts num_local_experts "
    "n_routed_experts moe_num_experts rotary_dim linear_num_heads",
    HEAD_DIM: "head_dim d_kv kv_channels dim_head attention_head_dim global_head_dim q_lora_rank kv_lora_rank "
    "qk_rope_head_dim qk_nope_head_dim v_head_dim hidden_size_per_layer_input index_head_dim linear_key_head_dim "
    "linear_value_head_dim linear_head_dim",
    POSITIONS: "max_position_embeddings n_positions n_ctx seq_length max_seq_len",
    WINDOW: "sliding_window window_size attention_window attention_window_size sliding_window_size local_attention "
    "attention_chunk_size",
    VOCAB: "vocab_size vocab_size_per_layer_input",
    1: "n_group topk_group n_shared_experts first_k_dense_replace bos_token_id decoder_start_token_id",
    0: "num_kv_shared_layers num_nextn_predict_layers pad_token_id",
}
SIZES = {name: size for size, names in NAMES.items() for name in names.split()}
SIZES |= {"eos_token_id": None, "is_decoder": True, "add_cross_attention": False, "tie_word_embeddings": False}
SIZES |= {"attention_types": [[["global", "local"], 1]], "index_topk": 4}
SIZES |= {"index_n_heads": 16}  # with few heads, many scores are exactly 0, and any of these columns may be chosen
GIVEN_ANYWAY = ("eos_token_id", "pad_token_id", "head_dim", "bos_token_id", "intermediate_size", "n_inner")
LATENT = {"num_key_value_heads": HEADS}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 8}
RECURRENT = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
GROUPS = {"num_key_value_heads": HEADS, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
BLOCKS = {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]}
CONVOLUTION = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
ROTATIONS = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")}
PLANES = {"mrope_section": [1, 1, 2]}
SHARED = {"num_hidden_layers": 4, "num_kv_shared_layers": 2}  # the last layers use the keys of the others
SHARED |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
INDEXER |= {"indexer_compress_ratio": 2}
SPARSE = {f"swa_{name}": HEADS for name in ("num_attention_heads", "num_key_value_heads")}
SPARSE |= {f"swa_{name}": HEAD_DIM for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")}
SPARSE |= {"swa_head_dim": 2 * HEAD_DIM, "num_hidden_layers": 3}
SPARSE |= {"layer_types": ["indexed_attention", "sliding_attention", "full_attention"]}
# Target families with a recurrent state or a convolution in some layers.
HYBRIDS = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), RECURRENT),
    **dict.fromkeys(("lfm2", "lfm3", "lfm2_moe"), CONVOLUTION),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), {**RECURRENT, **GROUPS}),
    "granitemoehybrid": {**RECURRENT, **MAMBA},
    "bamba": {**MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "falcon_h1": {"mamba_chunk_size": 8, "mamba_d_state": 16},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "chunk_size": 8},
    "zamba2": {**BLOCKS, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_d_state": 16, "chunk_size": 8},
    "zaya": {"num_experts_per_tok": 1},
}
OTHERS = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), LATENT),
    **dict.fromkeys(("minicpm3", "sarvam_mla", "youtu"), LATENT),
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "glm_moe_dsa": {**LATENT, "num_hidden_layers": 3, "indexer_types": ["full", "full", "shared"]},
    "dots3_note_text": {**LATENT, **SPARSE},
    **HYBRIDS,
    "jamba": {"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "longcat_flash": {**LATENT, "expert_ffn_hidden_size": 32, "moe_topk": 2, "zero_expert_num": 0},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "nemotron": {"num_key_value_heads": HEADS},
    "deepseek_v2": {**LATENT, "num_experts_per_tok": 2},
    "doge": {"keep_window_size": 2048},  # beyond it, tokens that occur twice have equal ranks
    "xmod": {"default_language": "en_XX"},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    **dict.fromkeys(("gemma3n_text", "gemma4_text", "gemma4_unified_text"), SHARED),
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text"), {"rope_parameters": {**ROTATIONS["full_attention"], **PLANES}}
    ),
    "llama4_text": {"no_rope_layer_interval": 2},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (16, 16)},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"], "rope_parameters": ROTATIONS},
    "zamba": {**BLOCKS, "layers_block_type": ["linear_attention", "hybrid", "linear_attention"]},
    "qwen4_exp_text": {**RECURRENT, **INDEXER},
}


def sizes_of(config: PreTrainedConfig) -> dict:
    """Returns small values for the settings that a config has."""
    default, sizes = config.to_dict(), {}
    for name, value in SIZES.items():
        if name in default and (default[name] is not None or name in GIVEN_ANYWAY):
            sizes[name] = value
    for name in getattr(config, "sub_configs", {}):
        if getattr(config, name, None) is not None:
            inner = getattr(config, name)
            sizes[name] = {**sizes_of(inner), **OTHERS.get(inner.model_type, {})}
    return sizes


def tiny_config(family: str) -> PreTrainedConfig:
    sizes = {**sizes_of(AutoConfig.for_model(family)), "is_decoder": True, **OTHERS.get(family, {})}
    return AutoConfig.for_model(family, **sizes)


def likely_draft(target: PreTrainedModel, weight: float = 32.0) -> PreTrainedModel:
    """
    Returns a draft with attention for a target of any family: it knows which tokens the target's own embeddings and
    head alone would let follow. The embeddings of the target are changed to weigh so much more.
    """
    embeddings, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    sizes = {"hidden_size": embeddings.shape[1], "vocab_size": len(embeddings), "intermediate_size": 8}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": None, "pad_token_id": 0}
    draft = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=POSITIONS)).eval()
    with torch.no_grad():
        embeddings.mul_(weight)
        for weights in (draft.model.layers[0].self_attn.o_proj.weight, draft.model.layers[0].mlp.down_proj.weight):
            weights.zero_()
        draft.get_input_embeddings().weight.copy_(embeddings)
        draft.get_output_embeddings().weight.copy_(head)
    return draft


def sharp_model(config: PreTrainedConfig, noise: float = 0.0, kind=AutoModelForCausalLM) -> PreTrainedModel:
    """Returns a model with clear favourites, the same each time but for noise on its weights."""
    torch.manual_seed(0)
    model = kind.from_config(config).eval()
    generator, of_noise = (torch.Generator().manual_seed(seed) for seed in (4, 5))
    with torch.no_grad():
        for weights in model.parameters():
            values = torch.randn(weights.shape, generator=generator)
            weights.copy_(0.25 * values if weights.dim() > 1 else weights + 0.1 * values)
            weights.add_(noise * torch.randn(weights.shape, generator=of_noise))
    return model


def sharp_pair(
    family: str, noise: float = 0.0, kind=AutoModelForCausalLM, **changes
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Returns a target, and a draft with noise on its weights."""
    config = tiny_config(family)
    config.update(changes)
    return hf_ssd.enable(sharp_model(config, kind=kind)), sharp_model(config, noise, kind)
