"""
Every family of decoder-only models in transformers: whether it can be a target and a draft, and the sentence that
refuses it otherwise. `test_families.py` tests each entry, and `docs/supported_models.md` is generated from this file:

    python -m tests.conformance.models
"""

from pathlib import Path

LISTED_WITH = (5, 24)  # the newest release of transformers whose families are all listed
PAGE = Path(__file__).parents[2] / "docs" / "supported_models.md"
SUPPORTED = "supported"

# Families that are supported as a target and as a draft, by `model_type`.
BOTH = """
afmoe apertus apertus1p5_text arcee aria_text axk1 axk2 bailing_hybrid bamba beam bert bert-generation big_bird biogpt
bitnet camembert codegen cohere cohere2 cohere2_moe cohere_compass_text ctrl cwm data2vec-text dbrx deepseek_v2
deepseek_v3 deepseek_v32 diffllama doge dory dots1 dots3_note_text electra emu3 ernie ernie4_5 ernie4_5_moe exaone
exaone4 exaone_moe falcon falcon_h1 flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text
gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2 gpt_bigcode
gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared
helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 iquestcoder jais2 jetmoe kimi_linear
kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 llama llama4 llama4_text longcat_flash megatron-bert mellum mimo_v2_flash
minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral mllama modernbert-decoder moshi nanochat
nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe
qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next rembert roberta roberta-prelayernorm
roc_bert sarvam_mla sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xglm xlm-roberta
xlm-roberta-xl xmod youtu zamba2 zaya
"""

# The others: their states as a target and as a draft. Words other than `supported` are keys of `REFUSED`.
OTHERS = {
    ("no_positions", SUPPORTED): "moss_transcribe_diarize whisper",
    ("no_positions", "no_mask"): "bloom cpmant mpt prophetnet",
    ("no_positions", "own_mask"): """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart roformer trocr
    """,
    ("compressed", "compressed"): "deepseek_v4",
    ("forgets", "forgets"): "jamba recurrent_gemma zamba",
    ("indexed", "indexed"): "qwen4_exp qwen4_exp_text",
    ("no_attention", "no_attention"): "falcon_mamba mamba mamba2",
    ("no_mask", "no_mask"): "inkling2_loop_text inkling2_text inkling_text openai-gpt xlm",
    ("own_cache", "own_cache"): "minimax reformer rwkv xlnet xlstm",
    ("own_mask", "own_mask"): "gpt_neo",
}

# The sentences that refuse a family, after the name of the model's class.
REFUSED = {
    "compressed": "uses a compressed state (DeepseekV4HCACache), which cannot be rolled back to a rejected token;",
    "forgets": "gives other logits for several tokens behind its recurrent state than for one after the other,",
    "indexed": "has sparse attention (DynamicIndexedLayer) beside recurrent layers;",
    "no_attention": "has recurrent layers alone, whose state cannot be rolled back to a rejected token;",
    "no_mask": "does not take a 4D attention mask and position ids:",
    "no_positions": "takes no `position_ids`, which verification needs.",
    "own_cache": "uses a compressed state (its own cache), which cannot be rolled back to a rejected token;",
    "own_mask": "does not obey a 4D attention mask with position ids, or makes a mask of its own",
}

# Why no small model of a family is made.
NOT_BUILT = {
    "blt": "four models in one, whose sizes depend on each other",
    "dots3_note": "its text model is `dots3_note_text`",
    "gemma3n": "its vision tower needs timm; its text model is `gemma3n_text`",
    "gemma4_assistant": "it reads hidden states of another model",
    "gemma4_unified_assistant": "it reads hidden states of another model",
    "git": "plain generate() with padding and without an image reads the padding",
    "musicgen": "it generates audio",
    "musicgen_melody": "it generates audio",
}

# Every way in which models attend and know positions is among the families of the quick tests.
QUICK = (
    "gpt2",  # learned positions
    "opt",  # learned positions, counted from 2
    "xglm",  # sinusoidal positions
    "gptj",  # attention and feed-forward side by side
    "gpt_bigcode",  # one key for all heads
    "falcon",  # makes a mask where it is given none
    "gemma2",  # capped logits
    "gemma3n_text",  # layers that use the keys of another layer
    "cohere2",  # full layers without positions
    "llama4_text",  # chunks
    "mixtral",  # experts
    "deepseek_v3",  # latent attention
    "deepseek_v32",  # sparse attention
    "gpt_oss",  # sinks
)
POPULAR = ("llama", "qwen3", "gemma3_text", "mistral", "phi3", "gpt_oss", "qwen3_moe", "gemma4_text", "llama4_text")

# Models that also read images, with text alone: all of them are supported as targets and as drafts.
MULTIMODAL = ("gemma3", "gemma4", "llama4", "llava", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_vl")

FAMILIES = dict.fromkeys(BOTH.split(), (SUPPORTED, SUPPORTED))
FAMILIES |= {name: states for states, names in OTHERS.items() for name in names.split()}
FAMILIES |= dict.fromkeys(NOT_BUILT, ("not_built", "not_built"))

# Pairs that people use: hub ids, form of the draft, vocabulary sizes of the models' logits, and "ours": what was done
# with the pair here.
RANDOM = "tested with random weights"
PAIRS = f"""
`examples/pair/target` | `examples/pair/draft` | one token a pass | 2,048 each | run; trained weights
`examples/pair/target` | `examples/pair/parallel_draft` | parallel | 2,048, 2,112 | run; trained weights
`Qwen/Qwen3-8B`, `-14B`, `-32B` | `Qwen/Qwen3-0.6B` | one token a pass | 151,936 each | {RANDOM}
`Qwen/Qwen3-8B` | `amd/PARD-Qwen3-0.6B` | parallel | 151,936 each | {RANDOM}
`Qwen/Qwen2.5-7B-Instruct`, `-14B`, `-32B`, `-72B` | `Qwen/Qwen2.5-0.5B-Instruct` | one token a pass \
| 152,064, 151,936 | {RANDOM}
`meta-llama/Llama-3.1-8B-Instruct`, `-70B-Instruct`, `Llama-3.3-70B-Instruct` | `meta-llama/Llama-3.2-1B-Instruct` \
| one token a pass | 128,256 each | {RANDOM}
`Qwen/Qwen3-Next-80B-A3B-Instruct` | `Qwen/Qwen3-0.6B` | one token a pass | 151,936 each | {RANDOM}
`meta-llama/Llama-3.1-8B-Instruct` | `amd/PARD-Llama-3.2-1B` | parallel | 128,256 each | {RANDOM}
`google/gemma-2-27b-it` | `google/gemma-2-2b-it` | one token a pass | 256,000 each | {RANDOM}
`google/gemma-3-12b-it`, `-27b-it` | `google/gemma-3-1b-it` | one token a pass | 262,208, 262,144 | {RANDOM}
`HuggingFaceTB/SmolLM2-1.7B-Instruct` | `HuggingFaceTB/SmolLM2-135M-Instruct` | one token a pass \
| 49,152 each | {RANDOM}
""".strip().splitlines()


def page() -> str:
    """Returns the text of the document."""
    supported = [sum(states[place] == SUPPORTED for states in FAMILIES.values()) for place in (0, 1)]
    lines = [
        "<!-- Written by `python -m tests.conformance.models`; change that file instead. -->",
        "# Supported models",
        "",
        f"transformers {'.'.join(map(str, LISTED_WITH))} has {len(FAMILIES)} families of decoder-only models. "
        f"{supported[0]} of them can be targets and {supported[1]} can be drafts. The family of a model is the "
        "`model_type` in its `config.json`, or in the `text_config` of a model that also reads images or audio.",
        "",
        "*Supported* means: a small model with random weights gives the greedy tokens of plain `generate()` in "
        "float32, alone and in a batch of three with left padding, with lookaheads of 1, 4 and 7, past its sliding "
        "window, and gains more than one token a round; and a draft with the same weights is accepted at every token. "
        "A refused model raises `ValueError` with the sentence below, which begins with the name of the model's "
        "class, before any work starts.",
        "",
        "",
        "## Pairs",
        "",
        "The column *ours* says what was done here. Nothing from the hub was run, because no hub could be reached; "
        "`hf-ssd check TARGET DRAFT` tests a pair.",
        "",
        "| target | draft | form of the draft | vocabulary sizes | ours |",
        "| --- | --- | --- | --- | --- |",
        *(f"| {pair} |" for pair in PAIRS),
        "",
        "## Families",
        "",
        "| `model_type` | as a target | as a draft |",
        "| --- | --- | --- |",
    ]
    for name, (target, draft) in sorted(FAMILIES.items()):
        if name in NOT_BUILT:
            lines.append(f"| `{name}` | not tested: {NOT_BUILT[name]} | not tested |")
        else:
            states = (SUPPORTED if state == SUPPORTED else f"refused: {state}" for state in (target, draft))
            lines.append(f"| `{name}` | " + " | ".join(states) + " |")
    lines += ["", "## Models that also read images", ""]
    lines += ["With text alone:", "", "| `model_type` | as a target | as a draft |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {SUPPORTED} | {SUPPORTED} |" for name in MULTIMODAL]
    lines += ["", "## Why a family is refused", "", "| word | sentence |", "| --- | --- |"]
    lines += [f"| {word} | ... {sentence.rstrip(';:,')} |" for word, sentence in sorted(REFUSED.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
