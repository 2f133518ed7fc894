"""EAGLE-3 heads that the package speculators wrote, see `write_speculators.py`, give the logits that it computes."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_eagle3 import save_head
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ssd
from hf_ssd.drafting.heads.loading import head_for

from ..helpers.tiny import speculated

HERE = Path(__file__).parent
WRITTEN = HERE / "speculators"
PYTHON = HERE.parents[1] / "engines" / "speculators" / "bin" / "python"
MISSING = "the package speculators is not installed in engines/speculators; write_speculators.py says how"
NAMES = ["llama", "qwen3", "whole_vocabulary", "sliding", "converted"]
EXACT = {"atol": 1e-5, "rtol": 0}


def target_of(computed: dict) -> LlamaForCausalLM:
    """A target with the embeddings of the verifier."""
    vocab, size = computed["embed_tokens"].shape
    sizes = {"vocab_size": vocab, "hidden_size": size, "intermediate_size": size, "num_attention_heads": 2}
    target = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=8, tie_word_embeddings=False)).eval()
    target.get_input_embeddings().weight.data = computed["embed_tokens"]
    return target


def logits_of(head, computed: dict) -> torch.Tensor:
    """
    Returns what `logits` of the package holds, of the target's vocabulary. Token `i` of step `s` is read after tokens 0
    to `i` with features, and `s` tokens with the head's own states; it is a padding zero beyond the last token.
    """
    tokens, fused = computed["tokens"], head.fuse(computed["features"])
    steps, count = computed["logits"].shape[:2]
    padded, logits = torch.cat([tokens, tokens.new_zeros(steps)]), torch.empty(steps, count, head.config.vocab_size)
    for last in range(count):
        states = fused[: last + 1]
        for step in range(steps):
            output = head(head.inputs(padded[: len(states)], states)[None]).last_hidden_state[0, -1:]
            logits[step, last] = head.logits(output)[0]
            states = torch.cat([states, output])
    return logits


@torch.inference_mode()
def check(head, computed: dict, steps: int | None = None) -> None:
    ours, proposed = logits_of(head, computed), torch.arange(head.config.draft_vocab_size) + head.d2t
    torch.testing.assert_close(ours[:steps, :, proposed], computed["logits"][:steps], **EXACT)
    others = torch.ones(head.config.vocab_size, dtype=torch.bool).index_fill(0, proposed, False)
    assert (ours[:, :, others] == -torch.inf).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_head_gives_the_logits_of_the_package_speculators(name):
    computed = load_file(WRITTEN / name / "computed.safetensors")
    target = target_of(computed)
    head = head_for(WRITTEN / name, target)
    # While it trains, the package moves no window with the tokens that it reads with the head's own states.
    check(head, computed, steps=1 if name == "sliding" else None)
    config = json.loads((WRITTEN / name / "config.json").read_text())
    assert head.config.target_layers == (config["eagle_aux_hidden_state_layer_ids"] or [2, 4, 5])
    is_shared = head.embed_tokens.weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    assert is_shared == (name == "converted")


@pytest.mark.parametrize("name", ["whole_vocabulary", "sliding"])
def test_a_head_of_the_package_drafts(name):
    target = hf_ssd.enable(target_of(load_file(WRITTEN / name / "computed.safetensors")))
    options = {"eos_token_id": None, "pad_token_id": 0}
    output = speculated(target, str(WRITTEN / name), {"input_ids": torch.tensor([[5, 3, 7, 1]])}, least=0, **options)
    assert {*output.ssd_stats.column("mode")} == {"in_turn"}


def form_of(folder: Path) -> tuple:
    """Returns the config without versions, and the names, types and shapes of the weights."""
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    form = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
    return {name: value for name, value in config.items() if not name.endswith("_version")}, form


def run_package(*arguments) -> None:
    subprocess.run([PYTHON, HERE / "write_speculators.py", *arguments], check=True, capture_output=True, timeout=120)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason=MISSING)
def test_the_installed_package_writes_heads_in_the_same_format(tmp_path):
    run_package(tmp_path)
    for name in NAMES:
        assert form_of(tmp_path / name) == form_of(WRITTEN / name)
        computed = load_file(tmp_path / name / "computed.safetensors")
        check(head_for(tmp_path / name, target_of(computed)), computed, steps=1 if name == "sliding" else None)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason=MISSING)
def test_the_installed_package_reads_a_head_that_was_saved_here(tmp_path):
    target = target_of(load_file(WRITTEN / "converted" / "computed.safetensors"))
    head = head_for(WRITTEN / "converted", target)
    head.config.norm_before_residual = False  # as in the format of SafeAILab
    save_head(head, tmp_path / "head")
    target.save_pretrained(tmp_path / "verifier")
    run_package(tmp_path / "read", "--head", tmp_path / "head", "--verifier", tmp_path / "verifier")
    check(head, load_file(tmp_path / "read" / "computed.safetensors"))


def test_other_speculators_are_refused_in_a_sentence(tmp_path):
    values = json.loads((WRITTEN / "llama" / "config.json").read_text()) | {"speculators_model_type": "peagle"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="is a speculator of the type 'peagle'"):
        hf_ssd.launch_draft(tmp_path)
    target = hf_ssd.enable(target_of(load_file(WRITTEN / "llama" / "computed.safetensors")))
    with pytest.raises(ValueError, match="is a speculator of the type 'peagle'"):
        target.generate(torch.tensor([[1, 2]]), assistant_model=tmp_path, ssd_config=hf_ssd.SSDConfig())
