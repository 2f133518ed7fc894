"""Runs openvino-genai, in an environment of its own: `compare_engines.py` starts it with a job, and reads figures."""

import json
import sys
import time

import numpy as np
import openvino
import openvino_genai


def main() -> None:
    job = json.load(sys.stdin)
    options = {"INFERENCE_NUM_THREADS": job["threads"], "INFERENCE_PRECISION_HINT": "f32"}
    plain = openvino_genai.LLMPipeline(job["target"], "CPU", **options)
    draft = openvino_genai.draft_model(job["draft"], "CPU", **options)
    speculating = openvino_genai.LLMPipeline(job["target"], "CPU", draft_model=draft, **options)
    ways = {"plain generate": (plain, None)} | {f"draft, {n}": (speculating, n) for n in job["lookaheads"]}
    print(json.dumps({name: run(pipeline, n, job) for name, (pipeline, n) in ways.items()}))


def run(pipeline, lookahead: int | None, job: dict) -> dict:
    """Returns tokens per second, the first token included, and the tokens. A short run goes before."""
    config = openvino_genai.GenerationConfig()
    config.do_sample, config.ignore_eos = False, True
    if lookahead is not None:
        config.num_assistant_tokens = lookahead
    ids = np.array([job["prompt"]], dtype=np.int64)
    for config.max_new_tokens in (min(16, job["new_tokens"]), job["new_tokens"]):
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        start = time.perf_counter()
        tokens = list(pipeline.generate(inputs, config).tokens[0])
        seconds = time.perf_counter() - start
    return {"speed": len(tokens) / seconds, "tokens": tokens}


if __name__ == "__main__":
    main()
