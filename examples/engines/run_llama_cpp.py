"""Runs llama.cpp by xllamacpp: plainly, with prompt lookup (its n-grams) and with a draft. See `job.py`."""

import json
import re
from pathlib import Path

import gguf
import job
import xllamacpp
from safetensors.numpy import load_file

KINDS = xllamacpp.common_speculative_type
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}


def exported(folder: str) -> str:
    """
    Writes a Llama or a Qwen 2 as GGUF in float32 beside its folder, unless it is there, and returns the file. Prompts
    are tokens, so the file has placeholders for the tokens' texts.
    """
    made = Path(f"{folder}.gguf")
    if made.exists():
        return str(made)
    config, weights = json.loads((Path(folder) / "config.json").read_text()), load_file(f"{folder}/model.safetensors")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(made.with_suffix(".part"), gguf.MODEL_ARCH_NAMES[architecture])
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
    writer.add_token_list([f"<{token}>" for token in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["< 0"])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, weight in weights.items():
        for kind, count in heads.items():
            if f".{kind}." in name and config["model_type"] == "llama":
                # llama.cpp rotates pairs of neighbours in a Llama, transformers halves
                halves = weight.reshape(count, 2, -1, weight.shape[1])
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), weight.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made.with_suffix(".part").rename(made)
    return str(made)


def settings(target: str, threads: int) -> xllamacpp.CommonParams:
    """Returns the settings of a target in float32, with nothing that drafts."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = exported(target), 2048, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.speculative.types = [KINDS.COMMON_SPECULATIVE_TYPE_NONE]
    return params


def speculate(params: xllamacpp.CommonParams, draft: str, lookahead: int, threads: int) -> None:
    """Adds a draft to the settings."""
    params.speculative.types, model = [KINDS.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE], params.speculative.draft
    model.mparams.path, model.n_max = exported(draft), lookahead
    model.cpuparams.n_threads = model.cpuparams_batch.n_threads = threads
    model.cache_type_k = model.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32


def ways(work: dict) -> dict:
    def load(kind=KINDS.COMMON_SPECULATIVE_TYPE_NONE, n=0):
        params = settings(work["target"], work["threads"])
        if kind == KINDS.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE:
            params.speculative.types = [kind]
            params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = 3, n
        if kind == KINDS.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE:
            speculate(params, work["draft"], n, work["threads"])
        server = xllamacpp.Server(params)

        def generate(prompt, new_tokens):
            request = {"prompt": prompt, "n_predict": new_tokens, "temperature": 0, "samplers": ["top_k"], "top_k": 1}
            answer = server.handle_completions(request | {"ignore_eos": True, "cache_prompt": False})
            return [int(token) for token in re.findall(r"<(\d+)>", answer["choices"][0]["text"])]

        return generate

    return {"plain": load} | job.speculating(
        work,
        lambda n: load(KINDS.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE, n),
        lambda n: load(KINDS.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE, n),
    )


if __name__ == "__main__":
    job.do(ways)
