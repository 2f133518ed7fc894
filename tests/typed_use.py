"""
What a type checker must know of the public names: `mypy` checks this file, which is not run. A wrong call that mypy
no longer notices leaves its `type: ignore` unused, which is an error too.
"""

from typing import assert_type

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

import hf_ssd

model = LlamaForCausalLM.from_pretrained("target")
target = assert_type(hf_ssd.enable(model), LlamaForCausalLM)
config = hf_ssd.SSDConfig(lookahead=4, fan_out=[3, 0, 0, 0, 2], asynchronous=False)
hf_ssd.SSDConfig(lookahed=4)  # type: ignore[call-arg]
hf_ssd.SSDConfig(timeout="30")  # type: ignore[arg-type]

with hf_ssd.launch_draft("draft", device="cpu", num_threads=1) as assistant:
    assert_type(assistant, hf_ssd.DraftAssistant)
    target.generate(torch.zeros(1, 3), assistant_model=assistant, ssd_config=config, max_new_tokens=8)
hf_ssd.launch_draft(7)  # type: ignore[arg-type]
hf_ssd.enable(target, assistant_model="draft", ssd_config={"lookahead": 4})
hf_ssd.enable(target, drafter="ngram")  # type: ignore[call-arg]
assert_type(hf_ssd.disable(target), LlamaForCausalLM)
hf_ssd.close("draft")

output = hf_ssd.generate(target, torch.zeros(1, 3), assistant_model="draft", streamer=hf_ssd.BatchStreamer(print))
if isinstance(output, hf_ssd.SSDDecoderOnlyOutput):
    assert_type(output.ssd_stats.hit_rate, float)
    records: list[hf_ssd.RoundRecord] = output.ssd_stats.records
    print(output.ssd_stats.hitrate)  # type: ignore[attr-defined]
else:
    assert_type(output, torch.LongTensor)


def speedup(stats: hf_ssd.SSDStats, draft: PreTrainedModel) -> float:
    try:
        return stats.tokens_per_round
    except hf_ssd.DraftError as error:
        raise RuntimeError(str(error)) from error
