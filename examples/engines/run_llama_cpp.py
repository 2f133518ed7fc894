"""Runs llama.cpp by xllamacpp: plainly, with prompt lookup (its n-grams) and with a draft. See `job.py`."""

import re
from pathlib import Path

import gguf
import job
import llama_gguf
import xllamacpp

KINDS = xllamacpp.common_speculative_type


def exported(folder: str) -> str:
    """
    Writes a Llama or a Qwen 2 as GGUF in float32 beside its folder, unless it is there, and returns the file. Prompts
    are tokens, so the file has placeholders for the tokens' texts.
    """
    made = Path(f"{folder}.gguf")
    if not made.exists():
        unfinished = made.with_suffix(".part")
        llama_gguf.write(folder, unfinished, add_placeholders)
        unfinished.rename(made)
    return str(made)


def add_placeholders(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    writer.add_token_list([f"<{token}>" for token in range(vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab_size)
    writer.add_token_merges(["< 0"])


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
