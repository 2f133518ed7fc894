"""The package speculators writes tiny EAGLE-3 heads in its format, each with the logits that it computes.

    python -m venv engines/speculators
    engines/speculators/bin/pip install torch==2.13.0 speculators==0.9.0
    engines/speculators/bin/python tests/drafting/write_speculators.py tests/drafting/speculators

The package pins another version of transformers, so it needs an environment of its own. The heads in the folder
`speculators` beside this file were written by these commands, with transformers 5.19.0. With `--head` and `--verifier`,
the package converts that head, which is in the format of SafeAILab, and writes what it computes.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.convert.eagle.eagle3_converter import Eagle3Converter
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from transformers import AutoConfig, LlamaForCausalLM

VOCAB, DRAFT_VOCAB, STEPS = 24, 18, 3
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 4, "max_position_embeddings": 64,
}  # fmt: skip
VERIFIER = {**SIZES, "num_hidden_layers": 8, "initializer_range": 0.3, "tie_word_embeddings": False}
LLAMA = {"model_type": "llama", "num_hidden_layers": 1, **SIZES}
QWEN3 = {**LLAMA, "model_type": "qwen3"}
HEADS = {
    "llama": {"norm_before_residual": True},
    "qwen3": {"layer": QWEN3, "norm_before_residual": False, "norm_before_fc": True, "target_layer_ids": [1, 3, 4, 6]},
    "whole_vocabulary": {"norm_before_residual": True, "fc_norm": True, "norm_output": True, "draft_vocab_size": VOCAB},
    "sliding": {
        "layer": {**QWEN3, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
        "norm_before_residual": True, "embed_requires_grad": True,
    },
}  # fmt: skip


def new_head(verifier: str, layer: dict | None = None, draft_vocab_size: int = DRAFT_VOCAB, **options):
    """Makes a head as the package's training does, and gives it random weights."""
    config = AutoConfig.for_model(**(layer or LLAMA))
    own = torch.randperm(VOCAB)[:draft_vocab_size].sort().values
    mappings = {
        "d2t": own - torch.arange(draft_vocab_size),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, own, True),
    }
    options |= {"draft_vocab_size": draft_vocab_size, "draft_attn_impl": "eager", "ttt_steps": STEPS}
    head = Eagle3DraftModel.from_training_args(config, **mappings, verifier_name_or_path=verifier, **options)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return head.eval()


@torch.no_grad()
def write(folder: Path, head: Eagle3DraftModel, verifier: str) -> None:
    """
    Writes inputs, and logits of the head's own tokens of shape `(STEPS, tokens, draft_vocab_size)`. In the first step
    each token is read with the verifier's features of the token before it, in later steps with the head's own state.
    """
    target, tokens = LlamaForCausalLM.from_pretrained(verifier), torch.randint(0, VOCAB, (9,))
    states = target(tokens[None], output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in head.target_layer_ids], dim=-1)[:, :-1]
    logits, read = [], tokens[None, 1:]
    hook = head.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
    head(features, read, torch.zeros_like(read), ttt_steps=STEPS)
    hook.remove()
    written = {"tokens": read[0], "features": features[0], "logits": torch.stack(logits)}
    save_file({**written, "embed_tokens": target.get_input_embeddings().weight}, folder / "computed.safetensors")
    for file in folder.glob("*.py"):  # of the package
        file.unlink()
    (folder / "model.safetensors").chmod(0o644)


def convert(folder: Path, given: str, verifier: str, **options) -> None:
    """Converts a head in the format of SafeAILab, which has no embeddings."""
    Eagle3Converter().convert(given, folder, verifier, validate=False, **options)
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    head = Eagle3DraftModel.from_pretrained(folder, config=config)
    head._load_verifier_weights(overwrite_embed_tokens=True)  # version 0.9.0 leaves uninitialized memory there
    write(folder, head.eval(), verifier)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--head")
    parser.add_argument("--verifier")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.head:
        convert(args.folder, args.head, args.verifier)
        return
    folder = args.folder.absolute()
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)  # so that configs name the verifier without a folder
        LlamaForCausalLM(AutoConfig.for_model("llama", **VERIFIER)).save_pretrained("verifier")
        for name, options in HEADS.items():
            head = new_head("verifier", **options)
            head.save_pretrained(folder / name)
            write(folder / name, head, "verifier")
        other = Path("safeailab")
        other.mkdir()
        state = load_file(folder / "llama" / "model.safetensors")
        state.pop("embed_tokens.weight")
        state = {name.replace("layers.0.", "midlayer."): weights for name, weights in state.items()}
        save_file(state, other / "model.safetensors")
        (other / "config.json").write_text(json.dumps({**LLAMA, "draft_vocab_size": DRAFT_VOCAB}))
        convert(folder / "converted", "safeailab", "verifier", norm_before_residual=True)


if __name__ == "__main__":
    main()
