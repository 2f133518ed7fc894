"""Writes a Llama or a Qwen 2 as a GGUF file in float32. Needs no more than gguf and safetensors."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
from safetensors.numpy import load_file

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}


def write(folder: str | Path, file: Path, add_tokens: Callable[[gguf.GGUFWriter, int], None]) -> None:
    """Writes the model of a folder. `add_tokens(writer, vocab_size)` adds the texts and the types of its tokens."""
    config, weights = json.loads((Path(folder) / "config.json").read_text()), load_file(f"{folder}/model.safetensors")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads["q_proj"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    add_tokens(writer, config["vocab_size"])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, weight in weights.items():
        for kind, count in heads.items():
            if f".{kind}." in name and config["model_type"] == "llama":
                # GGUF has pairs of neighbours side by side in a Llama, transformers halves
                halves = weight.reshape(count, 2, -1, weight.shape[1])
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), weight.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
