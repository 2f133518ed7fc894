"""Runs openvino-genai: plainly, with prompt lookup and with a draft. See `job.py`."""

import subprocess
import sys
from pathlib import Path

import job
import numpy as np
import openvino
import openvino_genai


def exported(folder: str) -> str:
    """Writes a model in OpenVINO's format beside its folder, unless it is there, and returns the format's folder."""
    made, programs = Path(f"{folder}-openvino"), Path(sys.executable).parent
    if not (made / "openvino_detokenizer.xml").exists():
        task = ["--task", "text-generation-with-past", "--weight-format", "fp32", "--disable-convert-tokenizer"]
        for command in (
            [programs / "optimum-cli", "export", "openvino", "--model", folder, *task, made],
            [programs / "convert_tokenizer", folder, "--with-detokenizer", "-o", made],
        ):
            subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
    return str(made)


def ways(work: dict) -> dict:
    options = {"INFERENCE_NUM_THREADS": work["threads"], "INFERENCE_PRECISION_HINT": "f32"}

    def pipeline(lookahead=None, **speculation):
        model = openvino_genai.LLMPipeline(exported(work["target"]), "CPU", **speculation, **options)
        config = openvino_genai.GenerationConfig()
        config.do_sample, config.ignore_eos = False, True
        if lookahead is not None:
            config.num_assistant_tokens = lookahead
        if "prompt_lookup" in speculation:
            config.max_ngram_size = 3

        def generate(prompt, new_tokens):
            config.max_new_tokens, ids = new_tokens, np.array([prompt], dtype=np.int64)
            inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
            return model.generate(inputs, config).tokens[0]

        return generate

    def with_draft(n):
        return pipeline(n, draft_model=openvino_genai.draft_model(exported(work["draft"]), "CPU", **options))

    return {"plain": pipeline} | job.speculating(work, lambda n: pipeline(n, prompt_lookup=True), with_draft)


if __name__ == "__main__":
    job.do(ways)
