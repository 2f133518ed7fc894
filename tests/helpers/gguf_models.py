"""GGUF files of small Llamas, for tests."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file


def write_gguf(folder: str, file: Path) -> Path:
    """Writes a Llama and its tokenizer, both in a folder, as a GGUF file in float32, and returns the file."""
    gguf = pytest.importorskip("gguf")
    config, weights = json.loads(Path(folder, "config.json").read_text()), load_file(Path(folder, "model.safetensors"))
    tokens = json.loads(Path(folder, "tokenizer.json").read_text())["model"]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(tokens["vocab"], key=tokens["vocab"].get))
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (config["vocab_size"] - 1)])
    writer.add_token_merges([" ".join(pair) for pair in tokens["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weight in weights.items():
        for kind, count in heads.items():
            if f".{kind}." in name:  # GGUF has pairs of neighbours side by side, transformers halves
                weight = weight.view(count, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
