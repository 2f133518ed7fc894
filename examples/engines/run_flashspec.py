"""Runs flashspec with prompt lookup and with a draft; its plain decoding is transformers'. See `job.py`."""

import job
import torch
from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
from flashspec.engine import HuggingFaceDrafter, NgramDrafter, TargetModel
from transformers import AutoModelForCausalLM


def ways(work: dict) -> dict:
    torch.set_num_threads(work["threads"])
    place = (torch.device("cpu"), torch.float32)

    def engine(drafter, n):
        sampling = SamplingConfig(temperature=0.0, gamma=n)
        config = FlashSpecConfig(
            device="cpu", dtype="float32", compile=False, sampling=sampling,
            drafter_strategy="bandit", bandit=BanditConfig(n_arms=1),
        )  # fmt: skip
        target = TargetModel(work["target"], *place, model=loaded(work["target"]))
        made = SpeculativeEngine(config, [drafter], target)

        def generate(prompt, new_tokens):
            result = made.generate(torch.tensor([prompt]), max_new_tokens=new_tokens)
            return result.output_ids[0, : result.n_tokens_generated].tolist()

        return generate

    def with_draft(n):
        return engine(HuggingFaceDrafter(work["draft"], *place, model=loaded(work["draft"])), n)

    return job.speculating(work, lambda n: engine(NgramDrafter(), n), with_draft)


def loaded(folder: str):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


if __name__ == "__main__":
    job.do(ways)
