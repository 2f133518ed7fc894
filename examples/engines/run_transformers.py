"""Runs transformers: plainly, with prompt lookup and with a draft (assisted generation). See `job.py`."""

import job
import torch
from transformers import AutoModelForCausalLM


def ways(work: dict, **always) -> dict:
    """Returns ways to generate with `always` as options of each call."""
    torch.set_num_threads(work["threads"])
    target = AutoModelForCausalLM.from_pretrained(work["target"], dtype="float32").eval()
    draft = work["draft"] and AutoModelForCausalLM.from_pretrained(work["draft"], dtype="float32").eval()

    def generate_with(**options):
        def generate(prompt, new_tokens):
            ids = torch.tensor([prompt])
            kept = {"max_new_tokens": new_tokens, "do_sample": False, "attention_mask": torch.ones_like(ids)}
            return target.generate(ids, **kept, **always, **options)[0, len(prompt) :].tolist()

        return generate

    def with_draft(n):
        draft.generation_config.update(
            num_assistant_tokens=n, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
        )
        return generate_with(assistant_model=draft)

    return {"plain": generate_with} | job.speculating(
        work, lambda n: generate_with(prompt_lookup_num_tokens=n), with_draft
    )


if __name__ == "__main__":
    job.do(ways)
