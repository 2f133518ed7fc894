"""Runs hf_ssd: with n-grams, and with a draft, in a worker if there are two cores. See `job.py`."""

import contextlib

import job
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_ssd


def main() -> None:
    with contextlib.ExitStack() as stack:
        job.do(lambda work: ways(work, stack))


def ways(work: dict, stack: contextlib.ExitStack) -> dict:
    torch.set_num_threads(work["threads"])
    target = hf_ssd.enable(AutoModelForCausalLM.from_pretrained(work["target"], dtype="float32").eval())

    def generate_with(config, **options):
        def generate(prompt, new_tokens):
            ids = torch.tensor([prompt])
            options.update(max_new_tokens=new_tokens, do_sample=False, attention_mask=torch.ones_like(ids))
            return target.generate(ids, ssd_config=config, **options)[0, len(prompt) :].tolist()

        return generate

    def with_draft():
        options = {}
        if work["own_draft"] != work["draft"]:  # a vocabulary of its own
            names = {"tokenizer": work["target"], "assistant_tokenizer": work["own_draft"]}
            options = {key: AutoTokenizer.from_pretrained(folder) for key, folder in names.items()}
        if work["threads"] == 1:
            draft = AutoModelForCausalLM.from_pretrained(work["own_draft"], dtype="float32").eval()
            return generate_with(hf_ssd.SSDConfig(), assistant_model=draft, **options)
        assistant = stack.enter_context(hf_ssd.launch_draft(work["own_draft"], dtype="float32"))
        return generate_with(hf_ssd.SSDConfig(), assistant_model=assistant, **options)

    found = {"prompt lookup": lambda: generate_with(hf_ssd.SSDConfig(drafter="ngram"))}
    return found | ({"draft": with_draft} if work["draft"] else {})


if __name__ == "__main__":
    main()
